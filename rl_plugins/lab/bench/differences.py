"""The paired difference of two variants at equal budget.

A difference is paired by seed and read at equal budget: of the two runs of a seed, the smaller total of the cost unit.
A value is the mean over the last quarter of the budget, linear between evaluations. The interval is Student's t.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats

from rl_plugins.lab.bench.results import SEARCH_FROM, Point, Results
from rl_plugins.lab.bench.tasks import METRICS

LAST = 0.25
TOTALS = ("tokens", "rows")  # metrics that are costs themselves: read at the end
ENOUGH, PLANNED = 8, 28  # seeds of a verdict: the least, and as many as new runs get
LEVEL, POWER = 0.95, 0.8


@dataclass(frozen=True)
class Difference:
    """A variant minus another one, in units of the metric.

    Attributes:
        mean, low, high: of the paired difference, with the ends of its 95 % interval.
        seen: size of the effect that so many seeds with this spread show in four of five cases.
        value, other: means of both variants.
        seeds: number of pairs.
    """

    mean: float
    low: float
    high: float
    seen: float
    value: float
    other: float
    seeds: int


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
    budget: str = "steps",
    seeds: Sequence[int] = range(SEARCH_FROM),
    than_task: str = "",
) -> Difference | None:
    """The paired difference of two variants in a task; None without two seeds that both have.

    Args:
        than_task: the task of the second one; empty: the same.
    """
    name, than_task = METRICS[metric][0], than_task or task
    pairs = []
    for seed in sorted(set(results.seeds(task, variant, seeds)) & set(results.seeds(than_task, than, seeds))):
        both = [results.runs[t, v, seed].curves for t, v in ((task, variant), (than_task, than))]
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
    delta, means, n = values[:, 0] - values[:, 1], values.mean(0), len(values)
    mean, error = float(delta.mean()), float(delta.std(ddof=1)) / math.sqrt(n)
    half, more = (float(stats.t.ppf(q, n - 1)) * error for q in ((1 + LEVEL) / 2, POWER))
    return Difference(mean, mean - half, mean + half, half + more, float(means[0]), float(means[1]), n)


def _reached(curves: Mapping[str, Sequence[Point]], cost_unit: str) -> float:
    return max((float(points[-1][0][cost_unit]) for points in curves.values()), default=math.nan)
