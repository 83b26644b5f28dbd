"""The page docs/reference.md: what a method uses, on one page. The page of the site describes every field."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from typing import Any

from rl_plugins.core.method import HOOKS, Method
from rl_plugins.lab.pages.methods import table
from rl_plugins.lab.pages.reference import entries, members, sections, signature, types_of

_HEAD = """\
# Reference

<!-- Written by `make docs`; do not edit. -->

What a method uses, in the order of a training step. Shapes are in parentheses: (rows,) is one number per row. On the
driver, numbers of rows are float64 and numbers of tokens float32, all on the CPU. Nothing is changed in place:
`x.replace(...)` makes a changed copy. [A class per hook](guides/hooks.md) has an example of each hook, links to what it
uses here, and the names of `needs`. `python -m pydoc rl_plugins.Rollouts` shows the whole docstring of an object; so
does the page of the site (`make site`).
"""
# With a description of each field; the rest by name and type.
_WHOLE = {"rl_plugins": "Rollouts Groups Tokens Shape Terms"}
_BRIEF = {
    "rl_plugins": "Run PromptPool Plan PlanRow Completion Queue Admission Rows Update Prompt Trajectory Generate Score "
    "Call",
    "rl_plugins.core.rollouts": "GroupSoFar Carried TurnTable TokenIds",
    "rl_plugins.core.requests": "Turn Generated Scored Called",
}
_FUNCTIONS = {
    "rl_plugins": "param from_params signals ppo_clip aggregate",
    "rl_plugins.core.estimators": "grpo_advantages",
}
_TESTING = {
    "rl_plugins.testing": "check_method make_run start_stack make_plan make_rollouts make_turns make_tokens make_rows "
    "make_terms one_row_per_turn one_step",
    "rl_plugins.testing.engine": "TableEngine make_prompt run_program",
}


def short_page() -> str:
    """The whole page."""
    called = {name: getattr(Method, name) for name in ("check", "start", *HOOKS)}
    places = {name: hook.place for name, hook in HOOKS.items()}
    hooks = [[f"`{n}{signature(f)}`{_example(n)}", places.get(n, "driver"), _first(f)] for n, f in called.items()]
    own = [
        [f"`self.{shown[1:]}", f"{what.partition('. ')[0].rstrip('.')}."]
        for shown, what in _members(Method)
        if re.match(r"`(state|log|rng|warn|stop|note)\b", shown)
    ]
    parts = [
        _HEAD.rstrip("\n"),
        "## Hooks",
        table(["hook", "runs in", "what"], hooks),
        "A hook on the driver gets all rows of a generation batch, and only there is `self.state`. Generation and "
        "update run in every process.",
        "## What a method calls",
        table(["call", "what"], own),
    ]
    for name, found in _named(_WHOLE):
        parts += [f"## {name}", _first(found), table(["field", "what"], _fields(found))]
    parts += ["## Other objects", _homes(_BRIEF), table(["object", "fields"], [_listed(f) for _, f in _named(_BRIEF)])]
    for title, of in (("Functions", _FUNCTIONS), ("Tests", _TESTING)):
        rows = [[f"`{name}{signature(found)}`{_anchor(name)}", _first(found)] for name, found in _named(of)]
        parts += [f"## {title}", _homes(of), table(["function", "what"], rows)]
    return "\n\n".join(parts) + "\n"


def _example(hook: str) -> str:
    return f" [example](guides/hooks.md#{hook})" if hook in HOOKS else ""


def _anchor(name: str) -> str:
    """What a link to the name leads to. On the page of the site it is a heading."""
    return f'<a id="{name.lower()}"></a>'


def _named(of: Mapping[str, str]) -> Iterator[tuple[str, Any]]:
    """(name, object) of the names of each module."""
    for module, names in of.items():
        yield from ((name, getattr(importlib.import_module(module), name)) for name in names.split())


def _homes(of: Mapping[str, str]) -> str:
    lines = [f"{', '.join(f'`{name}`' for name in names.split())} from `{module}`" for module, names in of.items()]
    return f"Import {'; '.join(lines)}."


def _first(found: Any) -> str:
    """The first paragraph of a docstring."""
    _, text = next(iter(sections(inspect.getdoc(found) or "")))
    return " ".join(text.strip().split("\n\n")[0].split())


def _fields(found: type) -> Iterator[list[str]]:
    """Fields with their descriptions, then methods and properties."""
    text = dict(sections(inspect.getdoc(found) or ""))
    for names, what in entries(text.get("Attributes") or text["Args"]):
        yield [", ".join(f"`{n}`" for n in names.split(", ")), what]
    yield from ([shown, what] for shown, what in _members(found))


def _members(found: type) -> Iterator[tuple[str, str]]:
    return ((shown.replace("\\|", "|"), what) for shown, what in members(found))  # `table` escapes


def _listed(found: type) -> list[str]:
    named = [f"`{name}: {kind}`" for name, (kind, _) in types_of(found).items() if kind]
    return [
        f"`{found.__name__}`{_anchor(found.__name__)}",
        ", ".join([*named, *(shown for shown, _ in _members(found))]),
    ]
