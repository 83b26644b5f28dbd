"""What we measured: records that scripts and the bench wrote, and the verdict that follows from their figures.

A file of `records/` belongs to one script of `examples/evidence/` (or to the bench) and is a list of records. No figure
and no verdict is typed: a script writes what it computed, and `verdict` reads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

Verdict = Literal["better", "worse", "no significant difference"]


@dataclass(frozen=True)
class Result:
    """One measurement of a method against a baseline.

    Args:
        method: the method or bundle it is about.
        claim: what was looked at, in a few words: "right answers on held-out prompts".
        mean, low, high: the difference to the baseline with its 95 % interval, in `unit`.
        better: the direction in which the method is the better one.
        baseline: what it is compared with: "GRPO".
        seeds: number of seeds; 0 where there are none, because nothing is drawn.
        budget: what is equal in both: "steps", "rollouts".
        unit: of all figures: "" for shares and rewards, "%", "points".
        value, other: means of the method and of the baseline, each perhaps with a half-width.
        page, where: page of docs/ and its section.
        imported: figures of a run before scripts wrote records, taken over from docs/evidence.md by a script.
    """

    method: str
    claim: str
    mean: float
    low: float
    high: float
    better: Literal["higher", "lower"]
    baseline: str
    seeds: int
    budget: str = ""
    unit: str = ""
    value: Sequence[float] = ()
    other: Sequence[float] = ()
    page: str = "evidence.md"
    where: str = ""
    imported: bool = False

    @property
    def verdict(self) -> Verdict:
        """By the sign of the 95 % interval."""
        if self.low <= 0 <= self.high:
            return "no significant difference"
        return "better" if (self.low > 0) == (self.better == "higher") else "worse"

    @property
    def numbers(self) -> str:
        """The figures as text: "0.84 ± 0.01 against 0.10 ± 0.09 (GRPO)"."""
        raise NotImplementedError


@cache
def results() -> tuple[Result, ...]:
    """All records of the package, by file."""
    folder = files("rl_plugins.cards").joinpath("records")
    texts = [file.read_text(encoding="utf-8") for file in sorted(folder.iterdir(), key=lambda f: f.name)]
    return tuple(Result(**record) for text in texts for record in json.loads(text))


def measured_of(method: str) -> list[Result]:
    """Our results on a method or bundle."""
    return [result for result in results() if result.method == method]
