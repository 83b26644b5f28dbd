"""The paired difference of two variants at equal budget.

A difference is paired by seed and read at equal budget: of the two runs of a seed, the smaller total of the cost unit.
A value is the mean over the last quarter of the budget, linear between evaluations. The interval is Student's t.

Seeds are added until a claim is decided, at most `LOOKS[-1]`. Looking several times would find differences by chance,
so every interval has the level 1 - 0.05 / number of looks, and p-values are multiplied by that number.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rl_plugins.cards.claims import numbers
from rl_plugins.cards.results import ALPHA
from rl_plugins.lab.bench.claims import LOOKS
from rl_plugins.lab.bench.results import SEARCH_FROM, Point, Results
from rl_plugins.lab.bench.tasks import METRICS

LAST = 0.25
TOTALS = ("tokens", "rows")  # metrics that are costs themselves: read at the end


@dataclass(frozen=True)
class Difference:
    """A variant minus another one, in units of the metric; positive is better for the direction that was asked for.

    Attributes:
        mean, low, high: of the paired difference; NaN with fewer than two seeds.
        value, other: means of both variants.
        seeds: number of pairs.
        above, below, negative: one-sided p-values, times the number of looks, of "not above zero", "at least `least`"
            and "not below zero".
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


def at_budget(points: Sequence[Point], cost_unit: str, budget: float) -> float:
    """Mean of a value over the last quarter of a budget; NaN where it does not reach that far."""
    costs = [float(cost[cost_unit]) for cost, _ in points]
    values = [value for _, value in points]
    if not costs or math.isnan(budget) or costs[0] > budget:
        return math.nan
    grid = np.linspace((1 - LAST) * budget, budget, 33)
    return float(np.interp(grid, costs, values).mean())


def difference(
    results: Results,
    task: str,
    variant: str,
    than: str,
    metric: str,
    better: str = "higher",
    budget: str = "steps",
    least: float = 0.0,
    seeds: Sequence[int] = range(SEARCH_FROM),
) -> Difference | None:
    """The paired difference of two variants in a task; None without two seeds that both have."""
    name, sign = METRICS[metric][0], 1.0 if better == "higher" else -1.0
    pairs = []
    for seed in sorted(set(results.seeds(task, variant, seeds)) & set(results.seeds(task, than, seeds))):
        both = [results.runs[task, a, seed].curves for a in (variant, than)]
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

    if error == 0:  # every seed has the same difference: the variants are equal, or there is nothing to estimate
        above, below, negative = (float(mean <= 0), float(mean >= least), float(mean >= 0))
    else:
        above, below, negative = p(mean / error), p((least - mean) / error), p(-mean / error)
    means = values.mean(0)
    return Difference(mean, mean - half, mean + half, float(means[0]), float(means[1]), n, above, below, negative)


def _reached(curves: Mapping[str, Sequence[Point]], cost_unit: str) -> float:
    return max((float(points[-1][0][cost_unit]) for points in curves.values()), default=math.nan)
