"""The class itself: its documentation and its parameters."""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from typing import Any, get_args, get_type_hints

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import SIGNALS, Method
from rl_plugins.core.params import build_params
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file
from rl_plugins.testing.contract.kit import NAN, OURS, Kit

# Sections of a docstring, in this order; the first sentence and the update rule have no heading.
SECTIONS = ("Reconstruction", "Symbols", "Special cases", "State", "Logs", "Raises", "Source")
RENAMED = {"Shapes": "Symbols", "Logged": "Logs", "Errors": "Raises", "Randomness": "State"}
_KNOWN = re.compile(rf"^({'|'.join((*SECTIONS, *RENAMED))})(?: \([^)]*\))?:(?=\s|$)", re.MULTILINE)
# Any other word or two before a colon, where a paragraph begins and goes on in the same line ("Update rule:" above a
# formula is no section).
_UNKNOWN = re.compile(r"\n\s*\n([A-Z][a-z]+(?: [a-z]+)?):[ ]+\S")


def check_declaration(kit: Kit) -> None:
    """declaration: name, hook signatures, class attributes"""
    registry.check_class(kit.cls, kit.cls.name, "check_method")
    if "teacher_prompts" in kit.cls.claims() and "teacher_logprobs" not in kit.build().needs:
        kit.fail('`teacher_prompts` is read for "teacher_logprobs" alone. Add it to `needs`.')


def check_prose(kit: Kit) -> bool:
    """prose: source, docstring and its sections, when to use and when not"""
    problems = prose_problems(kit.cls)
    for problem in problems:
        kit.fail(problem) if kit.is_ours else kit.warn(problem)
    return not problems


def prose_problems(cls: type[Method]) -> list[str]:
    """What readers of a method's card miss. A method of this package must have all of it; for others it is advice."""
    doc = inspect.cleandoc(cls.__doc__ or "")
    lines = [line for line in doc.splitlines() if line.strip()]
    problems = []
    if len(lines) < 5:
        problems.append(
            f"the docstring has {len(lines)} lines; it must open with the update rule and name symbols, shapes, errors "
            "and the source."
        )
    card = card_file(cls)
    paper = card.paper
    if paper is None or not re.fullmatch(r"\d{4}\.\d{4,5}", paper.arxiv):
        if cls.fidelity != "own" or cls.__module__.startswith(OURS):
            problems.append(
                "its card needs a table `paper` (arxiv, title, authors, year) with an arXiv id such as 2402.03300."
            )
    elif paper.arxiv not in doc + (getattr(sys.modules.get(cls.__module__), "__doc__", None) or ""):
        problems.append(f"the docstring does not name its source, arXiv {paper.arxiv}.")
    if cls.fidelity == "reconstruction" and "reconstruct" not in "\n".join(lines[:4]).lower():
        problems.append(
            'fidelity is "reconstruction", so the docstring must say in its first lines what was not published.'
        )
    problems += section_problems(doc)
    if empty := [f"`{name}`" for name in ("use_when", "avoid_when") if not getattr(card, name)]:
        verb = "is" if len(empty) == 1 else "are"
        problems.append(f"{' and '.join(empty)} of its card {verb} empty; one sentence helps users choose.")
    return problems


def section_problems(doc: str) -> list[str]:
    """What is wrong with the sections of a docstring (dedented): old names, unknown ones, the order."""
    found = _KNOWN.findall(doc)
    known = [name for name in found if name in SECTIONS]
    problems = [
        f"the docstring has a section `{name}:`; the name is `{RENAMED[name]}:` now."
        for name in found
        if name in RENAMED
    ]
    problems += [
        f"the docstring has a section `{name}:`, which is not among {', '.join(SECTIONS)}. Use one of these, or no "
        f"heading."
        for name in _UNKNOWN.findall(doc)
        if name not in found
    ]
    if known != sorted(known, key=SECTIONS.index):
        problems.append(f"the docstring's sections are {', '.join(known)}; the order is {', '.join(SECTIONS)}.")
    return problems


def check_parameters(kit: Kit) -> None:
    """parameters: documented, strict, limits enforced"""
    cls = kit.cls
    params = cls.Params
    try:
        build_params(params, kit.params, cls.name)
    except ConfigError as e:
        kit.fail(f"it cannot be built: {e} Give what has no default: check_method({cls.__name__}, parameter=..).")
        kit.usable = False
        return

    def refused(name: str, value: Any) -> bool:
        try:
            build_params(params, {**kit.params, name: value}, cls.name)
        except ConfigError:
            return True
        return False

    method = kit.build()
    for signal in method.needs:
        if signal not in SIGNALS and not re.match("column:.|engine:.", signal):
            kit.fail(f"`needs` has {signal!r}; known: {', '.join(SIGNALS)}, column:NAME, engine:logprobs=N.")
    if method.advantages_per == "turn" and "turns" not in method.needs:
        kit.fail('`advantages_per` is "turn", so `needs` must have "turns".')
    if not refused("no_such_parameter", 1):
        kit.fail("an unknown parameter is accepted.")
    hints = get_type_hints(params)
    for f in dataclasses.fields(params):
        if not f.metadata.get("help"):
            kit.fail(f"parameter `{f.name}` has no help; declare it with `param(default, help)`.")
        types = {hints[f.name], *get_args(hints[f.name])}
        if not types & {int, float}:
            continue
        illegal = [_beyond(k, v, float not in types) for k, v in f.metadata.get("limits", {}).items()]
        for value in [*illegal, NAN]:
            if not refused(f.name, (value,) if Ellipsis in types else value):
                kit.fail(f"parameter `{f.name}` accepts {value!r}, which is out of its range.")


def _beyond(limit: str, bound: float, whole: bool) -> float:
    """A number just outside of a limit."""
    if limit in ("gt", "lt"):
        return int(bound) if whole else bound
    step = 1 if whole else max(1.0, abs(bound)) * 1e-6
    value = bound - step if limit == "ge" else bound + step
    return int(value) if whole else value
