"""The page of the reference: the objects that a method sees, from their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import enum
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from rl_plugins.core.method import HOOKS, SIGNALS, Method

# Heading -> what is under it: (module without `rl_plugins`, names).
PARTS: Mapping[str, tuple[tuple[str, str], ...]] = {
    "A method and its parameters": (("", "Method Idle Bundle param MethodParams"),),
    "The run": (("", "Run"),),
    "What is generated": (
        ("", "PromptPool Plan PlanRow Completion"),
        ("core.rollouts", "GroupSoFar"),
        ("", "Queue"),
        ("core.rollouts", "Carried"),
        ("", "Admission"),
    ),
    "Rollout programs": (
        ("", "Prompt Trajectory"),
        ("core.requests", "Turn Kind"),
        ("", "Generate"),
        ("core.requests", "Generated"),
        ("", "Score"),
        ("core.requests", "Scored"),
        ("", "Call"),
        ("core.requests", "Called together Chat"),
    ),
    "Rollout programs of diffusion policies": (("core.denoising", "SamplePrompt Sample Transition Denoise"),),
    "Rollouts and their groups": (
        ("", "Rollouts"),
        ("core.rollouts", "PerRollout TurnTable TokenIds Jagged"),
        ("", "Groups Tokens Shape"),
        ("core.estimators", "grpo_advantages"),
    ),
    "The update": (("", "Rows Update Terms ppo_clip aggregate"),),
    "Services": (("kit.services", "Service number Failure NotAsked failures ChatEndpoint Endpoint"),),
    "Agents and environments": (
        ("kit.agents", "Observation Environment episodes Episode turn go_on finish play Opened"),
        ("kit.agents", "open_episode generate act reply"),
        ("kit.agents.turns", "Turns"),
        ("environments", "Gymnasium TextWorld Verifiers TRLTools"),
    ),
    "Tests of a method": (
        (
            "testing",
            "check_method make_rollouts make_tokens make_plan make_run make_terms make_rows start_stack one_step",
        ),
        ("testing.engine", "TableEngine make_prompt run_program"),
        ("testing.denoiser", "FlowEngine GaussianFlow make_sample_prompt run_sample_program"),
    ),
}

INTRO = """\
# Reference

The objects that a method sees, in the order of a training step, from their docstrings. How to use them:
[guides](guides/README.md). How the parts fit together: [architecture.md](architecture.md).

Shapes are in parentheses: (rows,) is one number per row. On the driver, numbers of rows are float64 and numbers of
tokens float32, all on the CPU. No object is changed by a hook: `x.replace(...)` makes a changed copy.
"""

_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Class attributes a method sets):[ ]*(.*)$")


def reference_page() -> str:
    """The whole page."""
    out = [INTRO, "## Contents\n"]
    for title, parts in PARTS.items():
        names = [name for _, of in parts for name in of.split()]
        out.append(f"- [{title}](#{_anchor(title)}): " + ", ".join(f"[`{n}`](#{_anchor(n)})" for n in names))
    out.append(f"- [Hooks](#hooks), [signals](#signals)\n\n## Hooks\n\n{_hooks()}\n\n## Signals\n\n{_signals()}")
    for title, parts in PARTS.items():
        out.append(f"## {title}")
        out += [_entry(module, name) for module, of in parts for name in of.split()]
    return (
        "\n\n".join(part.strip("\n") for part in out)
        .replace("\n\n- [", "\n- [")
        .replace("Contents\n- ", "Contents\n\n- ")
        + "\n"
    )


def objects() -> Iterator[tuple[str, Any]]:
    """(module, object) of everything on the page, in its order."""
    for parts in PARTS.values():
        for place, names in parts:
            for name in names.split():
                yield _module(place), getattr(importlib.import_module(_module(place)), name)


def _module(place: str) -> str:
    return f"rl_plugins.{place}" if place else "rl_plugins"


def undocumented() -> list[str]:
    """Fields, arguments and members of the page's objects without a description."""
    found = []
    for _, thing in objects():
        name = thing.__name__
        doc = inspect.getdoc(thing) or ""
        told = {n for title, text in sections(doc) if title for names, _ in entries(text) for n in names.split(", ")}
        wanted = [f.name for f in dataclasses.fields(thing)] if dataclasses.is_dataclass(thing) else []
        found += [] if doc else [name]
        found += [f"{name}.{field}" for field in wanted if field not in told]
        if inspect.isclass(thing):
            found += [f"{name}.{shown}" for shown, what in members(thing) if not what]
    return found


def _hooks() -> str:
    lines = ["| hook | place | several methods | what |", "|---|---|---|---|"]
    for name, hook in HOOKS.items():
        what = _text(" ".join(inspect.getdoc(getattr(Method, name)).split()))  # type: ignore[union-attr]
        arguments = ", ".join(list(inspect.signature(getattr(Method, name)).parameters)[1:])
        lines.append(f"| `{name}({arguments})` | {hook.place} | {hook.kind} | {what} |")
    return "\n".join(lines)


def _signals() -> str:
    head = (
        'What `needs` may name. `"column:NAME"` is a dataset column, `"engine:logprobs=N"` log-probs of N tokens.\n\n'
    )
    rows = [f"| `{name}` | {_text(what)} |" for name, what in SIGNALS.items()]
    return head + "\n".join(["| signal | what |", "|---|---|", *rows])


def _entry(place: str, name: str) -> str:
    """The section of one object."""
    module = _module(place)
    found = getattr(importlib.import_module(module), name)
    lines = [f"### {name}", ""]
    if inspect.isclass(found):
        lines += [f"`from {module} import {name}`", "", _prose(found)]
        if issubclass(found, enum.Enum):
            lines += ["", ", ".join(f"`{name}.{member.name}` = {member.value}" for member in found)]
        rows = [f"| {shown} | {_text(what)} |" for shown, what in members(found)]
        if rows:
            lines += ["", "| method or property | what |", "|---|---|", *rows]
    else:
        lines += [f"`from {module} import {name}`", "", f"`{name}{signature(found)}`", "", _prose(found)]
    return "\n".join(lines)


def _prose(found: Any) -> str:
    """A docstring as Markdown: paragraphs, code, and its sections as tables."""
    out: list[str] = []
    for title, text in sections(inspect.getdoc(found) or ""):
        if not title:
            out.append(_paragraphs(text))
        elif title in ("Returns", "Raises"):
            out.append(f"{title}: {_text(_joined(text))}")
        else:
            types = types_of(found)
            rows = []
            for names, what in entries(text):
                of = [types.get(n, ("", "")) for n in names.split(", ")]
                told = ", ".join(dict.fromkeys(f"`{t}`" for t, _ in of if t)).replace("|", "\\|")
                default = ", ".join(dict.fromkeys(f"`{d}`" for _, d in of if d)).replace("|", "\\|")
                shown = ", ".join(f"`{n}`" for n in names.split(", "))
                rows.append(f"| {shown} | {told} | {default} | {_text(what)} |")
            out.append("\n".join(["| name | type | default | what |", "|---|---|---|---|", *rows]))
    return "\n\n".join(out)


def sections(doc: str) -> Iterator[tuple[str, str]]:
    """(title, text) of a docstring's parts; the title of what stands before the first is empty."""
    title, lines = "", []  # type: str, list[str]
    for line in doc.splitlines():
        match = _SECTION.match(line)
        outside = title and line and not line.startswith(" ")
        if match or outside:
            yield title, "\n".join(lines)
            title, lines = (match[1], [match[2]]) if match else ("", [line])
        else:
            lines.append(line)
    yield title, "\n".join(lines)


def entries(text: str) -> Iterator[tuple[str, str]]:
    """(names, description) of a section with an entry per field."""
    found: list[list[str]] = []
    indent = min((len(line) - len(line.lstrip()) for line in text.splitlines() if line.strip()), default=0)
    for line in text.splitlines():
        if not line.strip():
            continue
        if len(line) - len(line.lstrip()) == indent:
            found.append([line.strip()])
        else:
            found[-1].append(line.strip())
    for one in found:
        names, _, what = " ".join(one).partition(": ")
        yield names, what


def types_of(found: Any) -> dict[str, tuple[str, str]]:
    """Field or argument -> its type and default, as the source has them."""
    if dataclasses.is_dataclass(found):
        return {f.name: (_type(f.type), _default(f)) for f in dataclasses.fields(found)}
    if getattr(found, "_is_protocol", False):
        return {}
    arguments = inspect.signature(found.__init__ if inspect.isclass(found) else found).parameters
    if found is Method:
        hints = inspect.get_annotations(found)
        return {n: (_type(t), _value(getattr(found, n, ""))) for n, t in hints.items()}
    empty = inspect.Parameter.empty
    return {
        n: (_type(p.annotation) if p.annotation is not empty else "", "" if p.default is empty else _value(p.default))
        for n, p in arguments.items()
    }


def _type(annotation: Any) -> str:
    text = annotation if isinstance(annotation, str) else getattr(annotation, "__name__", str(annotation))
    return re.sub(r"^ClassVar\[(.*)\]$", r"\1", text)


def _default(f: dataclasses.Field[Any]) -> str:
    if f.default is not dataclasses.MISSING:
        return _value(f.default)
    return "" if f.default_factory is dataclasses.MISSING else repr(f.default_factory())


def members(found: type) -> Iterator[tuple[str, str]]:
    """(as it is called, description) of the public methods and properties a class defines."""
    if issubclass(found, enum.Enum):
        return
    for name, value in vars(found).items():
        if name.startswith("_") or name in HOOKS:
            continue
        if isinstance(value, property | cached_property):
            yield f"`{name}`", _joined(inspect.getdoc(value) or "")
        elif inspect.isfunction(value):
            yield f"`{name}{signature(value)}`".replace("|", "\\|"), _joined(inspect.getdoc(value) or "")
        elif isinstance(value, classmethod):
            yield f"`{name}{signature(value.__func__)}`".replace("|", "\\|"), _joined(inspect.getdoc(value) or "")


def signature(function: Any) -> str:
    """Arguments and result, without `self`."""
    told = inspect.signature(function)
    shown: list[str] = []
    star = False
    for p in told.parameters.values():
        if p.name in ("self", "cls") and p.annotation is p.empty:
            continue
        if p.kind is p.KEYWORD_ONLY and not star:
            shown, star = [*shown, "*"], True
        star = star or p.kind is p.VAR_POSITIONAL
        prefix = "*" * (p.kind is p.VAR_POSITIONAL) + "**" * (p.kind is p.VAR_KEYWORD)
        typed = "" if p.annotation is p.empty else f": {_type(p.annotation)}"
        given = "" if p.default is p.empty else f" = {_value(p.default)}"
        shown.append(f"{prefix}{p.name}{typed}{given}")
    result = told.return_annotation
    return f"({', '.join(shown)})" + ("" if result in (told.empty, "None", None) else f" -> {_type(result)}")


def _value(default: Any) -> str:
    """A default as it would be written; empty where that is no short text."""
    text = repr(default)
    return text if len(text) <= 40 and not text.startswith("<") else ".."


def _joined(text: str) -> str:
    return " ".join(text.split())


def _paragraphs(text: str) -> str:
    """Paragraphs as one line each; indented blocks as code."""
    out = []
    for block in re.split(r"\n\s*\n", text.strip("\n")):
        if all(line.startswith("    ") for line in block.splitlines()) and block.strip():
            code = "\n".join(line[4:] for line in block.splitlines())
            out.append(f"```{'python' if _is_python(code) else 'text'}\n{code}\n```")
        elif block.strip():
            out.append(_joined(block))
    return "\n\n".join(out)


def _is_python(code: str) -> bool:
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


def _text(text: str) -> str:
    """For a table cell."""
    return text.replace("|", "\\|")


def _anchor(title: str) -> str:
    return re.sub(r"[^a-z0-9_ -]", "", title.lower()).replace(" ", "-")
