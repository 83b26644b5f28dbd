"""From the raw results to differences, and from these to what becomes of a claim.

A difference is paired by seed and read at equal budget: of the two runs of a seed, the smaller total of the currency. A
value is the mean over the last quarter of the budget, linear between evaluations. The interval is Student's t.

Seeds are added until a claim is decided, at most `LOOKS[-1]`. Looking several times would find differences by chance,
so every interval has the level 1 - 0.05 / number of looks, and p-values are multiplied by that number. Then they are
corrected for the number of comparisons (false discovery rate of 5 %, Benjamini and Hochberg).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy import stats

from rl_plugins.bench.cells import CELLS, METRICS
from rl_plugins.bench.claims import LOOKS, PaperClaim
from rl_plugins.bench.ours import numbers
from rl_plugins.bench.results import SEARCH_FROM, Point, Results

ALPHA = 0.05
LAST = 0.25
TOTALS = ("tokens", "rows")  # metrics that are costs themselves: read at the end

Verdict = Literal["confirmed", "refuted", "undecided", "not run", "failed", "not tested"]
Mark = Literal["better", "worse", "not told apart", "failed", "not run"]


@dataclass(frozen=True)
class Difference:
    """An arm minus another one, in units of the metric; positive is better for the direction that was asked for.

    Attributes:
        mean, low, high: of the paired difference; NaN with fewer than two seeds.
        value, other: means of both arms.
        seeds: number of pairs.
        above, below: one-sided p-values, times the number of looks, of "not above zero" and of "at least `least`".
    """

    mean: float
    low: float
    high: float
    value: float
    other: float
    seeds: int
    above: float
    below: float
    negative: float

    @property
    def text(self) -> str:
        """ "+0.061 (+0.022 to +0.100)"."""
        return numbers({"mean": self.mean, "low": self.low, "high": self.high})


def at_budget(points: Sequence[Point], currency: str, budget: float) -> float:
    """Mean of a value over the last quarter of a budget; NaN where it does not reach that far."""
    costs = [float(cost[currency]) for cost, _ in points]
    values = [value for _, value in points]
    if not costs or math.isnan(budget) or costs[0] > budget:
        return math.nan
    grid = np.linspace((1 - LAST) * budget, budget, 33)
    return float(np.interp(grid, costs, values).mean())


def difference(
    results: Results,
    cell: str,
    arm: str,
    than: str,
    metric: str,
    better: str = "higher",
    budget: str = "steps",
    least: float = 0.0,
    seeds: Sequence[int] = range(SEARCH_FROM),
) -> Difference | None:
    """The paired difference of two arms in a cell; None without two seeds that both have."""
    name, sign = METRICS[metric][0], 1.0 if better == "higher" else -1.0
    pairs = []
    for seed in sorted(set(results.seeds(cell, arm, seeds)) & set(results.seeds(cell, than, seeds))):
        both = [results.runs[cell, a, seed].curves for a in (arm, than)]
        if not all(name in curves for curves in both):
            continue
        if metric in TOTALS:
            pairs.append([curves[name][-1][1] for curves in both])
            continue
        reached = min(_reached(curves, budget) for curves in both)
        pairs.append([at_budget(curves[name], budget, reached) for curves in both])
    values = np.array([p for p in pairs if not any(map(math.isnan, p))], dtype=float)
    if len(values) < 2:
        return None
    delta = sign * (values[:, 0] - values[:, 1])
    n, mean, looks = len(delta), float(delta.mean()), len(LOOKS)
    error = float(delta.std(ddof=1)) / math.sqrt(n)
    half = float(stats.t.ppf(1 - ALPHA / looks / 2, n - 1)) * error

    def p(t: float) -> float:
        return min(looks * float(stats.t.sf(t, n - 1)), 1.0)

    if error == 0:  # every seed has the same difference: the arms are equal, or there is nothing to estimate
        above, below, negative = (float(mean <= 0), float(mean >= least), float(mean >= 0))
    else:
        above, below, negative = p(mean / error), p((least - mean) / error), p(-mean / error)
    means = values.mean(0)
    return Difference(mean, mean - half, mean + half, float(means[0]), float(means[1]), n, above, below, negative)


def _reached(curves: Mapping[str, Sequence[Point]], currency: str) -> float:
    return max((float(points[-1][0][currency]) for points in curves.values()), default=math.nan)


@dataclass(frozen=True)
class ClaimResult:
    """A claim and what became of it."""

    claim: PaperClaim
    verdict: Verdict
    found: Difference | None = None
    error: str = ""


def adjusted(ps: Iterable[float]) -> list[float]:
    """p-values corrected for their number (Benjamini and Hochberg)."""
    told = list(ps)
    return [float(q) for q in stats.false_discovery_control(told)] if told else []


def decide(results: Results, asked: Sequence[PaperClaim]) -> list[ClaimResult]:
    """The verdict of every claim, corrected for their number."""
    found = [
        difference(results, c.cell, c.label, c.than, c.metric, c.better, c.budget, c.least) if c.cell else None
        for c in asked
    ]
    run = [i for i, d in enumerate(found) if d is not None and d.seeds >= LOOKS[0]]
    told = [d for i in run if (d := found[i])]
    yes, no = adjusted(d.above for d in told), adjusted(d.below for d in told)
    verdicts: dict[int, Verdict] = {}
    for i, q_yes, q_no in zip(run, yes, no, strict=True):
        verdicts[i] = "refuted" if q_no < ALPHA / 2 else "confirmed" if q_yes < ALPHA / 2 else "undecided"
    out = []
    for i, claim in enumerate(asked):
        error = failure(results, claim.cell, claim.label)
        verdict: Verdict = verdicts.get(i, "not tested" if claim.untested else "failed" if error else "not run")
        out.append(ClaimResult(claim, verdict, found[i], error))
    return out


def failure(results: Results, cell: str, arm: str) -> str:
    """The error of an arm whose runs all failed; else empty."""
    runs = [run for (c, a, _), run in results.runs.items() if (c, a) == (cell, arm)]
    return runs[0].error if runs and all(run.error for run in runs) else ""


@dataclass(frozen=True)
class MatrixPlace:
    """One place of the matrix: an arm in a cell against GRPO, in the metric of the cell at equal steps."""

    mark: Mark
    found: Difference | None = None


def matrix(results: Results, arms: Sequence[str], than: str = "grpo") -> dict[tuple[str, str], MatrixPlace]:
    """(arm, cell) -> place, for what was run; corrected for the number of places."""
    found: dict[tuple[str, str], Difference] = {}
    out: dict[tuple[str, str], MatrixPlace] = {}
    for cell in CELLS.values():
        for arm in arms:
            if failure(results, cell.name, arm):
                out[arm, cell.name] = MatrixPlace("failed")
            elif d := difference(results, cell.name, arm, than, cell.metric):
                found[arm, cell.name] = d
    two_sided = adjusted(min(2 * min(d.above, d.negative), 1.0) for d in found.values())
    for (key, d), q in zip(found.items(), two_sided, strict=True):
        mark: Mark = "not told apart" if q >= ALPHA or d.seeds < LOOKS[0] else "better" if d.mean > 0 else "worse"
        out[key] = MatrixPlace(mark, d)
    return out
