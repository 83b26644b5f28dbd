"""Tool calls as text: reading them, comparing them with the right ones, and what a runtime says about a wrong one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_plugins.core.files import read_json
from rl_plugins.kit.texts import between

GENERIC = "Error: the call failed. Check the function, its arguments and their values, and try again."
UNREADABLE = (
    "Error: the tool call could not be parsed. Write it as a JSON object with the fields `name` and `arguments`."
)
_TYPES: dict[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
}


@dataclass(frozen=True)
class ToolCall:
    """A function and its arguments."""

    name: str
    arguments: Mapping[str, Any]


def as_calls(value: Any) -> list[ToolCall] | None:
    """Calls from a dataset column: a call or a list of calls, as objects or as JSON text. `arguments` may be JSON text,
    too, and a call may be inside a field `function`. None if it is something else."""
    if isinstance(value, str):
        try:
            value = read_json(value)
        except ValueError:
            return None
    items = [value] if isinstance(value, Mapping) else value
    if not isinstance(items, Sequence) or isinstance(items, str):
        return None
    found = []
    for item in items:
        item = item.get("function", item) if isinstance(item, Mapping) else item
        if not isinstance(item, Mapping) or not isinstance(item.get("name"), str):
            return None
        arguments = item.get("arguments", {})
        if isinstance(arguments, str):
            try:
                arguments = read_json(arguments)
            except ValueError:
                return None
        if not isinstance(arguments, Mapping):
            return None
        found.append(ToolCall(item["name"], dict(arguments)))
    return found


def read_calls(text: str) -> list[ToolCall] | None:
    """The calls of an answer: JSON objects in <tool_call> tags, or the whole answer as JSON. None: nothing readable."""
    tagged = between(text, "<tool_call>", "</tool_call>")
    if not tagged:
        found = as_calls(text)
        return found or None
    found = []
    for part in tagged:
        one = as_calls(part)
        if not one:
            return None
        found += one
    return found


def correctness(calls: Sequence[ToolCall] | None, gold: Sequence[ToolCall]) -> float:
    """How right calls are, 0 to 1: half for the functions (F1 of the multisets of names), half for the arguments (mean
    over matched calls of the F1 of their name-value pairs). Calls of the same function are matched, as many as there
    are on both sides, by the assignment of the largest sum of F1; a call too many or too few lowers the first half. 0
    if unreadable, 1 if neither has a call."""
    if calls is None:
        return 0.0
    if not calls or not gold:
        return float(not calls and not gold)
    from scipy.optimize import linear_sum_assignment  # takes longer to load than all methods

    fits: list[float] = []
    for name in {c.name for c in gold}:
        mine, right = ([c.arguments for c in side if c.name == name] for side in (calls, gold))
        if mine:
            f1 = np.array([[_pairs_f1(a, b) for b in right] for a in mine])
            fits += f1[linear_sum_assignment(f1, maximize=True)].tolist()
    arguments = sum(fits) / len(fits) if fits else 0.0
    return 0.5 * 2 * len(fits) / (len(calls) + len(gold)) + 0.5 * arguments


def simulate(calls: Sequence[ToolCall] | None, gold: Sequence[ToolCall] | None, tools: Any) -> str:
    """A runtime's message about the first thing that is wrong with the calls: the rule-based error simulator.

    Args:
        calls: of the answer, None if unreadable.
        gold: the right ones, or None.
        tools: schemas of the functions (a list, or JSON text; OpenAI's form or its inner part), or None.
    """
    schemas = _schemas(tools)
    if calls is None:
        return UNREADABLE
    for call in calls:
        problem = _against_schema(call, schemas)
        if problem:
            return f"Error: {problem}"
    for call in calls if gold else ():
        right = [g for g in gold or () if g.name == call.name]
        if not right:
            return f"Error: function '{call.name}' cannot do what was asked for."
        best = max(right, key=lambda g: _pairs_f1(call.arguments, g.arguments))
        problem = _against_gold(call, best)
        if problem:
            return f"Error: {problem}"
    if gold and len(calls) < len(gold):
        return "Error: the request is not complete; a further call is needed."
    if gold and len(calls) > len(gold):
        return "Error: a call is not needed for this request."
    return GENERIC


def leaks(message: str, gold: Sequence[ToolCall], known: str) -> bool:
    """Whether a message holds a value of the right arguments that is not known already (from the prompt or the failed
    answer). Values of fewer than 3 characters, true, false and null do not count."""
    message, known = message.lower(), known.lower()
    values = {str(v).lower() for call in gold for v in _leaves(call.arguments)}
    return any(len(v) >= 3 and v in message and v not in known for v in values)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, Mapping):
        for v in value.values():
            yield from _leaves(v)
    elif isinstance(value, list | tuple):
        for v in value:
            yield from _leaves(v)
    elif value is not None and not isinstance(value, bool):
        yield value


def _pairs_f1(a: Mapping[str, Any], b: Mapping[str, Any]) -> float:
    if not a and not b:
        return 1.0
    return 2 * sum(k in b and _same(v, b[k]) for k, v in a.items()) / (len(a) + len(b))


def _same(a: Any, b: Any) -> bool:
    return bool(a == b) and isinstance(a, bool) == isinstance(b, bool)


def _schemas(tools: Any) -> dict[str, Mapping[str, Any]]:
    """Parameters of each function, by name; empty if they cannot be read."""
    if isinstance(tools, str):
        try:
            tools = read_json(tools)
        except ValueError:
            return {}
    found = {}
    for tool in tools if isinstance(tools, Sequence) else ():
        tool = tool.get("function", tool) if isinstance(tool, Mapping) else {}
        if isinstance(tool.get("name"), str):
            parameters = tool.get("parameters")
            found[tool["name"]] = parameters if isinstance(parameters, Mapping) else {}
    return found


def _against_schema(call: ToolCall, schemas: Mapping[str, Mapping[str, Any]]) -> str:
    if not schemas:
        return ""
    if call.name not in schemas:
        return f"function '{call.name}' not found, available: {', '.join(sorted(schemas))}."
    schema = schemas[call.name]
    properties = schema.get("properties") or {}
    for name in schema.get("required") or ():
        if name not in call.arguments:
            return f"missing required argument '{name}' of '{call.name}'."
    for name, value in call.arguments.items():
        if properties and name not in properties:
            return f"'{call.name}' has no argument '{name}'."
        rule = properties.get(name) or {}
        kinds = _TYPES.get(str(rule.get("type")))
        if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            return f"argument '{name}' of '{call.name}' must be of type {rule['type']}."
        if rule.get("enum") and value not in rule["enum"]:
            return f"argument '{name}' of '{call.name}' must be one of {', '.join(map(str, rule['enum']))}."
    return ""


def _against_gold(call: ToolCall, gold: ToolCall) -> str:
    for name in gold.arguments:
        if name not in call.arguments:
            return f"missing argument '{name}' of '{call.name}'."
    for name, value in call.arguments.items():
        if name not in gold.arguments:
            return f"argument '{name}' of '{call.name}' is not needed."
        if not _same(value, gold.arguments[name]):
            return f"invalid value of argument '{name}' of '{call.name}'."
    return ""
