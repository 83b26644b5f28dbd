"""The problems of a run, which a user sees first, before any name of a method; and what answers them beside methods.

They are in `problems.toml`. `Method.problems` names keys of `PROBLEMS`; docs/choose.md and `rl-plugins suggest` are
made from both.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any, Literal

HOSTS = ("trl", "verl")
Kind = Literal["option", "tool", "page", "elsewhere"]
KINDS: tuple[Kind, ...] = ("option", "tool", "page", "elsewhere")


@dataclass(frozen=True)
class Problem:
    """One problem of a run.

    Attributes:
        title: heading of the page, e.g. "Groups without signal".
        seen: how it shows in a run, in one or two sentences.
        watch: the logs that show whether an answer works.
        words: what users and logs call it, with semicolons between.
    """

    title: str
    seen: str
    watch: str
    words: str

    @property
    def anchor(self) -> str:
        """Of its heading in docs/choose.md."""
        return "-".join(self.title.lower().split())


@dataclass(frozen=True)
class Answer:
    """An option of a host, a command of this package, a page of its documentation; or, where nothing here helps, the
    page of the host ("elsewhere").

    Attributes:
        does: what it does, in one line.
        use: host -> what to write in its config, a key a line; of a command or a page the same for both.
        problems: keys of `PROBLEMS` that it answers.
        words: what users and logs call it, with semicolons between.
        cost, against, watch: of an option that is shown first for a problem: what it takes, when not to set it, and the
            logs that show whether it works.
    """

    kind: Kind
    name: str
    does: str
    use: Mapping[str, str]
    problems: tuple[str, ...]
    words: str
    cost: str = ""
    against: str = ""
    watch: str = ""

    def in_line(self, host: str) -> str:
        """Its keys in one line, where there is no room for a line each."""
        return " and ".join(self.use[host].splitlines())


def _answer(kind: Kind, name: str, told: Mapping[str, str | list[str]]) -> Answer:
    use = {host: str(line) for host in HOSTS if (line := told.get("use") or told.get(host))}
    texts = {field: str(told[field]).strip() for field in ("cost", "against", "watch") if field in told}
    return Answer(kind, name, str(told["does"]), use, tuple(told.get("problems", ())), str(told["words"]), **texts)


def said() -> list[tuple[str, tuple[str, ...]]]:
    """What users say, and the names of what answers it: a method, or kind:name."""
    return [(one["text"], tuple(one["of"])) for one in _read("said")["said"]]


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(files("rl_plugins.cards").joinpath(f"{name}.toml").read_text(encoding="utf-8"))


_READ = _read("problems")
PROBLEMS: dict[str, Problem] = {
    key: Problem(**{name: " ".join(text.split()) for name, text in told.items()})
    for key, told in _READ["problem"].items()
}
ANSWERS: tuple[Answer, ...] = tuple(_answer(kind, name, told) for kind in KINDS for name, told in _READ[kind].items())
