"""Survivors: keep probabilities from the probabilities of being right, and draws with exactly these probabilities."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Mask = NDArray[np.bool_]
_EPS = 1e-6  # a mean probability of 0 or 1 is taken as this far from it
_ROUNDING = 1e-9  # of K n, so that 0.1 * 30 is 3


@dataclass(frozen=True)
class Rule:
    """Parameters of the paper's survival probability, see `survival`."""

    keep_ratio: float
    positive_ratio: float
    strength: float
    low: float
    high: float


def survival(q: Array, rule: Rule, shift: float) -> Array:
    """The paper's keep probability of each rollout, `clip(K + shift + strength (rho - q), low, high)`, shape of q."""
    raw = rule.keep_ratio + shift + rule.strength * (rule.positive_ratio - q)
    return np.clip(raw, rule.low, rule.high)


def shift_for(q: Array, weights: Array, rule: Rule) -> float:
    """The shift with which the weighted mean of `survival` is the keep ratio, by bisection; if the limits leave no such
    shift, the nearest."""
    low, high = -2.0 - rule.strength, 2.0 + rule.strength
    for _ in range(60):
        middle = (low + high) / 2
        if float(np.average(survival(q, rule, middle), weights=weights)) < rule.keep_ratio:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def balanced(q: Array, keep_ratio: float, positive_ratio: float) -> Array:
    """Keep probability of each rollout of a prompt, (n,), so that a share `keep_ratio` stays and `positive_ratio` of it
    is right (ours):

        a = min(1, K rho / mean q),  b = min(1, K (1 - rho) / (1 - mean q)),  s_i = q_i a + (1 - q_i) b
    """
    mean = float(np.clip(q.mean(), _EPS, 1 - _EPS))
    right, wrong = (
        min(1.0, keep_ratio * positive_ratio / mean),
        min(1.0, keep_ratio * (1 - positive_ratio) / (1 - mean)),
    )
    return q * right + (1 - q) * wrong


def inclusion(s: Array, k: int) -> Array:
    """`s` scaled so that it sums to `k`, with no entry above 1; the excess goes to the other entries. s > 0."""
    pi, free = np.ones_like(s), np.ones(len(s), dtype=bool)
    if k >= len(s):
        return pi
    while True:  # at least one entry reaches 1 per pass
        pi[free] = s[free] * (k - int((~free).sum())) / s[free].sum()
        above = free & (pi > 1)
        if not above.any():
            return pi
        pi[above], free[above] = 1.0, False


def draw(pi: Array, rng: np.random.Generator) -> Mask:
    """Each rollout with its probability `pi`, and sum(pi) of them in all, rounded up or down: systematic sampling in
    random order."""
    order = rng.permutation(len(pi))
    ends = np.cumsum(pi[order])
    if len(ends) and abs(ends[-1] - np.round(ends[-1])) < _ROUNDING:
        ends[-1] = np.round(ends[-1])
    chosen = np.zeros(len(pi), dtype=bool)
    chosen[order] = np.diff(np.floor(ends + rng.random()), prepend=0.0) > 0
    return chosen


def at_least(least: int, chosen: Mask, keep: Array) -> Mask:
    """`chosen`, and as many of the others as are missing to `least`: those of the largest keep probability first."""
    missing = least - int(chosen.sum())
    added = chosen.copy()
    if missing > 0:
        added[np.argsort(-np.where(chosen, -1.0, keep), kind="stable")[:missing]] = True
    return added


def extremes(q: Array, k: int, positive_ratio: float) -> Mask:
    """The round(k rho) best and k minus that worst, (n,). Of equal ones the earlier counts as worse."""
    best = _round(k * positive_ratio)
    order = np.argsort(q, kind="stable")
    chosen = np.zeros(len(q), dtype=bool)
    chosen[order[len(q) - best :]] = True
    chosen[order[: k - best]] = True
    return chosen


def count_to_keep(n: int, keep_ratio: float, least: int) -> int:
    """keep_ratio * n, halves up, but at least `least` (as far as there are so many)."""
    return min(n, max(_round(keep_ratio * n), least))


def _round(x: float) -> int:
    return int(np.floor(x + 0.5 + _ROUNDING))
