"""One of our methods as a contribution to a host, in the host's own form and without this package.

Each export is a folder of templates, `templates/<host>/<method>/`: files that end in `.in` are written at the
same place below the target, with `@@name@@` replaced; `insertions.json` says what existing files of the host's
repository get. A template is written once by hand, in the host's style, of a method that helped and that the released
host has a place for. A test holds it to the method: same numbers on random input, and a run on the released host.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Method
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file

FOLDER = Path(__file__).parent / "templates"


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
    paper = card_file(cls).paper
    assert paper is not None
    values = {"title": paper.title, "arxiv": paper.arxiv}
    files = []
    for template in sorted(source.rglob("*.in")):
        path = template.relative_to(source).with_suffix("")
        text, there = _filled(template.read_text(encoding="utf-8"), values), into / path
        state = "new" if not there.exists() else "unchanged" if there.read_text(encoding="utf-8") == text else "differs"
        files.append(Written(str(path), text, state))
    for insertion in json.loads((source / "insertions.json").read_text(encoding="utf-8")):
        files.append(_inserted(insertion, source, into, values))
    return files


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
