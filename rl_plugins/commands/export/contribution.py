"""One of our methods as a contribution to a host, in the host's own form and without this package.

Each export is a folder of templates, `templates/<host>/<method>/`: files that end in `.in` are written at the
same place below the target, with `@@name@@` replaced; `insertions.json` says what existing files of the host's
repository get. A template is written once by hand, in the host's style. A test holds it to the method: same numbers on
the authors' vectors and on random input, and a run on the released host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plugins.cards.results import measured_of
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Method
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file

FOLDER = Path(__file__).parent / "templates"
EVIDENCE = "https://github.com/rl-plugins/rl-plugins/blob/main/docs/evidence.md"
LINE = 119  # columns of TRL; verl has 120
VERL = "0.9.1"  # the release the recipes were run on


@dataclass(frozen=True)
class Written:
    """One file of an export.

    Attributes:
        path: below the target.
        text: all of it.
        state: "new", "unchanged", "differs" (another text is there), "extended" (an insertion) or "by hand" (the file
            or the place in it is missing; `text` is what goes there).
    """

    path: str
    text: str
    state: str


def available() -> dict[str, list[str]]:
    """Host -> the methods that can be exported to it."""
    return {h.name: sorted(m.name for m in h.iterdir() if m.is_dir()) for h in sorted(FOLDER.iterdir()) if h.is_dir()}


def plan(method: str, host: str, into: Path) -> list[Written]:
    """The files of an export, and what each is beside those that are there. Writes nothing.

    Raises:
        ConfigError: no such method, or no export of it for this host.
    """
    cls = registry.load(method)
    source = FOLDER / host / method
    if not source.is_dir() or not (isinstance(cls, type) and issubclass(cls, Method)):
        have = "; ".join(f"{h}: {', '.join(methods)}" for h, methods in available().items())
        raise ConfigError(
            f"There is no export of `{method}` for {host}. Exports are written "
            f"one by one ({have}). "
            f"CONTRIBUTING.md says how to add one."
        )
    values = _values(cls, source)
    files = []
    for template in sorted(source.rglob("*.in")):
        path = template.relative_to(source).with_suffix("")
        text, there = _filled(template.read_text(encoding="utf-8"), values), into / path
        state = "new" if not there.exists() else "unchanged" if there.read_text(encoding="utf-8") == text else "differs"
        files.append(Written(str(path), text, state))
    for insertion in json.loads((source / "insertions.json").read_text(encoding="utf-8")):
        files.append(_inserted(insertion, source, into, values))
    return files


def _values(cls: type[Method], source: Path) -> dict[str, str]:
    paper, vectors = card_file(cls).paper, json.loads((source / "vectors.json").read_text(encoding="utf-8"))
    assert paper is not None
    return {
        "title": paper.title,
        "arxiv": paper.arxiv,
        "url": paper.url,
        "code": paper.code or "",
        "commit": vectors["commit"],
        "vectors": _literal(vectors["cases"], len("AUTHORS_VECTORS = ")),
        "bibtex": paper.bibtex(cls.name),
        "measured": _measured(cls.name),
        "verl": VERL,
    }


def _literal(value: Any, before: int, indent: str = "") -> str:
    """A list or mapping as `ruff format` leaves it: in one line if it fits behind `before` characters."""
    flat = repr(value).replace("'", '"')
    if before + len(flat) + 1 <= LINE or not isinstance(value, (list, dict)):
        return flat
    named = [(f'"{k}": ', v) for k, v in value.items()] if isinstance(value, dict) else [("", v) for v in value]
    inner = indent + "    "
    lines = [f"{inner}{name}{_literal(part, len(inner + name), inner)},\n" for name, part in named]
    first, last = "{}" if isinstance(value, dict) else "[]"
    return f"{first}\n{''.join(lines)}{indent}{last}"


def _measured(name: str) -> str:
    found = measured_of(name)
    if not found:
        return "No training run was measured."
    lines = [f"- {m.line}." for m in found]
    return "\n".join([f"Measured with small policies on a CPU ([how]({EVIDENCE})):", "", *lines])


def _filled(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"@@(\w+)@@", lambda m: values[m[1]], text)


def _inserted(insertion: Mapping[str, str], source: Path, into: Path, values: Mapping[str, str]) -> Written:
    text = insertion.get("text") or (source / insertion["text_of"]).read_text(encoding="utf-8") + "\n"
    text, target = _filled(text, values), into / insertion["file"]
    if not target.exists():
        return Written(insertion["file"], text, "by hand")
    there = target.read_text(encoding="utf-8")
    if text in there:
        return Written(insertion["file"], there, "unchanged")
    place = re.search(f"^{re.escape(insertion['before'])}", there, re.MULTILINE)
    if place is None:
        return Written(insertion["file"], text, "by hand")
    return Written(insertion["file"], there[: place.start()] + text + there[place.start() :], "extended")
