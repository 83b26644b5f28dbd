"""What we measured in examples: records that the scripts wrote.

A file of `records/` belongs to one script of `examples/evidence/` and is a list of records. No figure is typed: a
script writes what it computed. A record has figures and no verdict, since it has no control: verdicts are those of
:mod:`rl_plugins.cards.claims`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from importlib.resources import files
from typing import Literal

Direction = Literal["higher", "lower"]


@dataclass(frozen=True)
class Result:
    """One measurement of a method against a baseline.

    Args:
        method: the method or bundle it is about.
        claim: what was measured, and where: "right answers on held-out prompts, TRL".
        better: the direction in which the method is the better one.
        baseline: what it is compared with: "GRPO"; may be empty where the claim names it.
        mean, low, high: the difference to the baseline with its 95 % interval, in `unit`; None where there is none.
        none: the value of `mean` that means no difference: 0; 1 where it is a ratio to the baseline, 100 in percent.
        value, other: of the method and of the baseline: the mean, and the half-width of its 95 % interval if known.
        paired: the interval is that of differences paired by seed, not of two independent means.
        unit: of all figures: "" for shares and rewards, "%", "points".
        seeds: number of seeds.
        budget: what is equal in both: "steps", "rollouts".
        note: what figures do not say.
        page, where: page of docs/ and the anchor of its section.
        imported: figures from before the scripts wrote records, taken over from the pages by a script.
    """

    method: str
    claim: str
    better: Direction
    baseline: str = ""
    mean: float | None = None
    low: float | None = None
    high: float | None = None
    none: float = 0.0
    value: Sequence[float] = ()
    other: Sequence[float] = ()
    paired: bool = False
    unit: str = ""
    seeds: int = 0
    budget: str = ""
    note: str = ""
    page: str = "evidence.md"
    where: str = ""
    imported: bool = False

    @property
    def metric(self) -> str:
        """The claim up to its first comma, which says what was measured."""
        return self.claim.partition(",")[0]

    @property
    def worse(self) -> bool:
        """Whether it was seen to be behind: the interval of the difference, or else both intervals apart."""
        sign = 1 if self.better == "higher" else -1
        if self.mean is not None and self.low is not None and self.high is not None:
            return max(sign * (self.low - self.none), sign * (self.high - self.none)) < 0
        if len(self.value) < 2 or len(self.other) < 2:
            return False
        (mine, half), (theirs, other) = self.value, self.other
        return sign * (theirs - mine) > half + other

    @property
    def line(self) -> str:
        """What was measured, with its figures, and which direction is better if it is not the usual one."""
        return f"{self.claim}, {self.numbers}" + (", lower is better" if self.better == "lower" else "")

    @property
    def numbers(self) -> str:
        """The figures as text: "0.84 ± 0.01 against 0.10 ± 0.09 (GRPO)"."""
        of = f" ({self.baseline})" if self.baseline else ""
        texts = []
        if self.value:
            digits = _decimals(*self.value, *self.other)
            texts.append(_figure(self.value, digits) + self._unit)
            if self.other:
                texts[0] += f" against {_figure(self.other, digits)}{of}"
        if self.mean is not None and (self.paired or not self.value):
            texts.append(("paired difference " if self.value else "") + self._difference)
        return "; ".join([*texts, *([self.note] if self.note else [])])

    @property
    def _unit(self) -> str:
        return f" {self.unit}" if self.unit else ""

    @property
    def _difference(self) -> str:
        """The difference or ratio with its interval."""
        assert self.mean is not None
        digits = _decimals(self.mean, *(x for x in (self.low, self.high) if x is not None))
        text = f"{self.mean:{'' if self.none else '+'}.{digits}f}"
        if self.low is not None and self.high is not None:
            half = (self.high - self.low) / 2
            even = abs(self.mean - self.low - half) < 1e-6 + half / 1000
            text += f" ± {half:.{digits}f}" if even else f" ({self.low:.{digits}f} to {self.high:.{digits}f})"
        if self.none:
            return f"{text}{self._unit} {'of' if self.unit == '%' else 'times'} {self.baseline}"
        return f"{text}{self._unit}" + (f" against {self.baseline}" if self.baseline and not self.other else "")


def _decimals(*figures: float) -> int:
    """Digits after the point that none of them needs more of."""
    return max(0, *(-int(Decimal(repr(round(x, 6))).normalize().as_tuple().exponent) for x in figures))


def _figure(figure: Sequence[float], digits: int) -> str:
    return " ± ".join(f"{x:.{digits}f}" for x in figure)


def read(text: str) -> list[Result]:
    """The records of a file.

    Raises:
        TypeError: a record lacks a field, or has one that no record has.
    """
    return [Result(**record) for record in json.loads(text)]


@cache
def results() -> tuple[Result, ...]:
    """All records of the package, by file."""
    folder = files("rl_plugins.cards").joinpath("records")
    found = sorted((file for file in folder.iterdir() if file.name.endswith(".json")), key=lambda file: file.name)
    return tuple(result for file in found for result in read(file.read_text(encoding="utf-8")))


def measured_of(name: str, parts: Iterable[str] = ()) -> list[Result]:
    """Our results on a method, a bundle or a supervised loss; of a bundle its own, then those of its parts, each with
    the name of the part in front of its claim."""
    found = [result for result in results() if result.method == name]
    for part in parts:
        found += [replace(r, claim=f"`{part}`: {r.claim}") for r in results() if r.method == part != name]
    return found
