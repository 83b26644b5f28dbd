"""The number of further rollouts of a prompt by its share of successes, and the split of a budget that is too small."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

Schedule = Literal["et", "hw"]
_NONE = 1e-6  # below this no rollout was right


def helping(rate: float, schedule: Schedule, n_first: int, n_max: int, use_std: bool = False) -> int:
    """Rollouts beyond the first ones. The expressions are the authors' own, because rounding of others can lift an
    exact integer by one.

    Args:
        rate: u, share of successes of the first rollouts, in [0, 1]; NaN: nothing is known, so none.
        schedule: "et", every prompt gets the total of |advantage| of one with u = 1/2, or "hw", 2 (1 - u) times that.
        n_first: N, first rollouts.
        n_max: rollouts in all, at most.
        use_std: whether advantages are divided by the deviation.
    """
    if math.isnan(rate) or rate >= 0.5:
        return 0
    u = 0.5 / n_first if rate <= _NONE else rate
    each = 2 * math.sqrt(u * (1 - u)) if use_std else 2 * u * (1 - u)
    peak = n_first if use_std else 0.5 * n_first
    wanted = peak if schedule == "et" else 2 * (1 - u) * peak
    return max(0, min(math.ceil((wanted - n_first * each) / each), n_max - n_first))


def served(asked: Sequence[int], room: int) -> list[int]:
    """The number that each gets of what it asked for: everything if there is room, else proportional shares, by largest
    remainder (of equal ones the first)."""
    total = sum(asked)
    if total <= room:
        return list(asked)
    found = [a * room // total for a in asked]
    by_rest = sorted(range(len(asked)), key=lambda i: -(asked[i] * room % total))
    for i in by_rest[: room - sum(found)]:
        found[i] += 1
    return found
