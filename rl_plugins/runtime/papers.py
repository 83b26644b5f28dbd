"""Papers that were reviewed and are no method: built as something else, not built yet, or not built, and why."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

Verdict = Literal["elsewhere", "open", "no"]

VERDICTS: dict[Verdict, str] = {
    "elsewhere": "is built, and is no method",
    "open": "is not built yet",
    "no": "was reviewed and is not built",
}


@dataclass(frozen=True)
class Reviewed:
    """A paper that is no method.

    Attributes:
        name: what a user would write in `methods`.
        arxiv: "2402.12527".
        why: where it is, or the reason.
        part_of: the bundle of the same paper, where this is one of its pieces; else empty.
    """

    name: str
    title: str
    arxiv: str
    verdict: Verdict
    why: str
    part_of: str = ""


@cache
def reviewed() -> dict[str, Reviewed]:
    """Name -> paper, in the order of `papers.toml`."""
    text = files("rl_plugins.runtime").joinpath("papers.toml").read_text(encoding="utf-8")
    return {paper.name: paper for paper in (Reviewed(**entry) for entry in tomllib.loads(text)["paper"])}


def no_method(name: str) -> str:
    """What to say of the name of such a paper in `methods`; empty for any other name."""
    paper = reviewed().get(name)
    if paper is None:
        return ""
    return (
        f"`{name}` ({paper.title}, arXiv {paper.arxiv}) {VERDICTS[paper.verdict]}. {paper.why} Remove it from "
        f"`methods`; `rl-plugins list` shows all methods."
    )
