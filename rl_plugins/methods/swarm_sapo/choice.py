"""Which of the scored groups of others are trained. Pure functions on rewards."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

SelectBy = Literal["uniform", "sample", "total_reward"]


def chosen(rewards: Sequence[Sequence[float]], most: int, by: SelectBy) -> list[int]:
    """Places of the groups that are trained, at most `most`. A group with a reward that is NaN is none of them.

    Args:
        rewards: of each candidate's rollouts; candidates in the order in which they were drawn (uniform, sample), or in
            which they are listed (total_reward).
        by: the rule.
    """
    scored = [i for i, group in enumerate(rewards) if group and not any(map(math.isnan, group))]
    if by == "total_reward":
        totals = [math.fsum(rewards[i]) for i in scored]
        return [scored[k] for k in by_total_reward(totals, most)]
    if by == "uniform":
        scored = [i for i in scored if max(rewards[i]) > min(rewards[i])]
    return scored[:most]


def by_total_reward(totals: Sequence[float], most: int) -> list[int]:
    """The released selection (gensyn-ai/genrl, `transplant_trees`), places in ascending order of their totals.

    Let f be the place of the first total that is not 0, in the order given; without one nothing is taken. The places
    are sorted by their totals. The first f of them leave, and the last `most` of the others stay. Using f in the sorted
    order is the index fault of that code, which is kept here.
    """
    first = next((i for i, total in enumerate(totals) if total != 0), None)
    if first is None or most == 0:
        return []
    return sorted(range(len(totals)), key=lambda i: totals[i])[first:][-most:]
