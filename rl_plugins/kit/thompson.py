"""The dataset rows with the best draws from their Beta posteriors, at a cost that the dataset's size hardly enters.

Every row i has the posterior Beta(alpha_i + 1, beta_i + 1) of its success rate p_i. One p_i is drawn for each, all
independent, and the n rows with the largest score of it are wanted, best first.

Up to `SMALL` rows that is done as written. Above, only draws that can be among the best are made. The score has one
peak, so score > t means that p lies in an interval around it. Levels t_1 > t_2 > .. are gone down until n rows are
found. At a level every row not found yet is above it with probability

    P_i = (F_i(outer) - F_i(inner)) / (1 - F_i(inner)),    F_i: mass of its posterior in the interval of a level

and P_i <= q for all rows, q from the largest density that a posterior with at most `most` counts can have there. So a
binomial number of rows, each with probability q, are looked at, each stays with probability P_i / q, and for those that
stay p_i is drawn within the level. What comes out has exactly the distribution of the plain form; q and the levels
change only how many rows are looked at, a small multiple of n.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.kit.prompt_memory import SMALL

Rows = np.ndarray[Any, np.dtype[np.int64]]
Rates = np.ndarray[Any, np.dtype[np.float64]]

_FIRST_LEVEL = 256  # rows that the first level would hold if every posterior were uniform


@dataclass(frozen=True)
class Draws:
    """Rows (n,) int64 and the success rates (n,) that were drawn for them, best first."""

    rows: Rows = field(default_factory=lambda: np.zeros(0, dtype=np.int64))
    rates: Rates = field(default_factory=lambda: np.zeros(0))

    def __len__(self) -> int:
        return len(self.rows)

    def first(self, n: int) -> Draws:
        return Draws(self.rows[:n], self.rates[:n])

    def then(self, more: Draws) -> Draws:
        return Draws(np.concatenate([self.rows, more.rows]), np.concatenate([self.rates, more.rates]))

    def without(self, rows: set[int]) -> Draws:
        stay = ~np.isin(self.rows, list(rows))
        return Draws(self.rows[stay], self.rates[stay])


@dataclass(frozen=True)
class Ranking:
    """A function of the success rate with one peak in (0, 1), rising before it and falling after it, with the second
    derivative -2 there, so that peak - (w / 2)^2 is a level of about the width w."""

    value: Callable[[Any], Any]
    place: float

    @property
    def peak(self) -> float:
        return float(self.value(self.place))

    def interval(self, level: float) -> tuple[float, float]:
        """Where the score is above a level; all of (0, 1) if the level is below 0."""
        from scipy.optimize import brentq

        if level <= 0:
            return 0.0, 1.0
        ends = (
            brentq(lambda p: self.value(p) - level, *side, xtol=1e-15) for side in ((0, self.place), (self.place, 1))
        )
        low, high = ends
        return float(low), float(high)


SCORES = {
    "p(1-p)^2": Ranking(lambda p: p * (1 - p) ** 2, 1 / 3),
    "p(1-p)": Ranking(lambda p: p * (1 - p), 1 / 2),
}


def best_draws(
    counts: Callable[[Tensor | slice], tuple[Tensor, ...]],
    size: int,
    most: float,
    score: Ranking,
    n: int,
    taken: set[int],
    rng: np.random.Generator,
) -> Draws:
    """The n rows with the largest scores of a draw.

    Args:
        counts: alpha and beta >= 0 of dataset rows, (rows,) float64 each.
        size: rows of the dataset.
        most: no row has alpha + beta above it.
        taken: rows that are not wanted; with the same generator, the answer continues the ranking of the same draw.
        n: at most size - len(taken).
    """
    if size <= SMALL:
        return _rest(counts, size, score, taken, (0.0, 0.0), rng).first(n)
    found, inner, width = Draws(), (score.place, score.place), _FIRST_LEVEL / size
    while len(wanted := found.without(taken).first(n)) < n:
        outer = score.interval(score.peak - (width / 2) ** 2)
        density = largest_density(most, outer)
        if density * (outer[1] - outer[0]) > 0.25:
            return found.then(_rest(counts, size, score, set(found.rows.tolist()), inner, rng)).without(taken).first(n)
        found = found.then(_level(counts, size, density, score, inner, outer, found.rows, rng))
        inner, width = outer, 2 * width
    return wanted


def _level(
    counts: Callable[[Tensor | slice], tuple[Tensor, ...]],
    size: int,
    density: float,
    score: Ranking,
    inner: tuple[float, float],
    outer: tuple[float, float],
    drawn: Rows,
    rng: np.random.Generator,
) -> Draws:
    """Rows whose p lies in the outer interval and not in the inner one, given that it is not in the inner one."""
    from scipy.special import betainc, betaincinv

    width = inner[1] - inner[0]
    bound = density * (outer[1] - outer[0] - width) / (1 - density * width)
    rows = rng.choice(size, rng.binomial(size, bound), replace=False, shuffle=False)
    rows = rows[~np.isin(rows, drawn)]
    alpha, beta = (c.numpy() + 1 for c in counts(torch.from_numpy(rows)))
    below, low, high, up = (betainc(alpha, beta, p) for p in (outer[0], *inner, outer[1]))
    left, right = low - below, up - high
    stays = rng.random(len(rows)) * bound < (left + right) / (1 - (high - low))
    rows, alpha, beta, below, high, left, right = (x[stays] for x in (rows, alpha, beta, below, high, left, right))
    mass = rng.random(len(rows)) * (left + right)
    p = betaincinv(alpha, beta, np.where(mass < left, below + mass, high + (mass - left)))
    order = np.argsort(-score.value(p), kind="stable")
    return Draws(rows[order], p[order])


def _rest(
    counts: Callable[[Tensor | slice], tuple[Tensor, ...]],
    size: int,
    score: Ranking,
    without: set[int],
    inner: tuple[float, float],
    rng: np.random.Generator,
) -> Draws:
    """All other rows, drawn one by one, given that no draw lies in the inner interval."""
    alpha, beta = (c.numpy() + 1 for c in counts(slice(None)))
    p = rng.beta(alpha, beta)
    again = np.flatnonzero((p > inner[0]) & (p < inner[1]))
    while len(again):
        p[again] = rng.beta(alpha[again], beta[again])
        again = again[(p[again] > inner[0]) & (p[again] < inner[1])]
    order = np.argsort(-score.value(p), kind="stable")
    return Draws(order, p[order]).without(without)


def largest_density(most: float, interval: tuple[float, float]) -> float:
    """The largest density that Beta(a + 1, b + 1) with a, b >= 0 and a + b <= most has in an interval.

    At x it is (e + 1) Gamma(e + 1) / (Gamma(a + 1) Gamma(b + 1)) x^a (1 - x)^b with e = a + b. Its maximum over a grows
    with e, falls in x before 1/2 and rises after it, so one of the ends of the interval has the largest. In a, the
    logarithm is concave.
    """
    from scipy.optimize import minimize_scalar
    from scipy.special import betaln, xlog1py, xlogy

    largest = 1.0
    for x in interval:
        x = min(max(x, 0.0), 1.0)
        if x in (0.0, 1.0):
            return most + 1

        def minus_log(a: float, x: float = x) -> float:
            return float(betaln(a + 1, most - a + 1) - xlogy(a, x) - xlog1py(most - a, -x))

        if most > 0:
            found = minimize_scalar(minus_log, bounds=(0, most), method="bounded", options={"xatol": 1e-6 * most})
            largest = max(largest, 1.001 * float(np.exp(-min(found.fun, minus_log(0.0), minus_log(most)))))
    return largest
