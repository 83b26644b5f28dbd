"""Rewards per step: the lists that reward functions return in the place of numbers, on their way to
`Rollouts.step_rewards`. Hosts compute with the sum of a list."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.errors import shown
from rl_plugins.core.groups import places, spread
from rl_plugins.core.rollouts import Jagged

Steps = list[float] | None
"""What a function returned for a rollout: its list, NaN where a step has no reward; None: a number, or nothing."""


def steps_of(answer: Any) -> Steps:
    """The list of an answer.

    Raises:
        TypeError: it holds something else than numbers and None.
    """
    if not np.ndim(answer):
        return None
    try:
        return [math.nan if x is None else float(x) for x in answer] or None
    except (TypeError, ValueError) as e:
        raise TypeError(
            f"a reward function returned {shown(answer)} for a rollout. Allowed are a number, None, or a list with a "
            f"number or None for each step."
        ) from e


def total(answer: Any) -> Any:
    """The reward of a rollout: the sum of a list, without its NaN; None if nothing is left; a number as it is."""
    if not np.ndim(answer):
        return answer
    known = [x for x in steps_of(answer) or () if not math.isnan(x)]
    return math.fsum(known) if known else None


def combined(functions: Sequence[Sequence[Steps]], rewards: Tensor, weights: Tensor) -> Jagged:
    """Weighted sum of the rewards of all functions, step by step. A number counts for the last step.

    Args:
        functions: of each function the lists of all rows.
        rewards: (rows, functions), read where there is no list; NaN: none.
        weights: (functions,)

    Returns:
        float64, one step a row at least; NaN for a step that no function rewarded.
    """
    lists = [
        [[number] if own is None else own for own, number in zip(rows, numbers, strict=True)]
        for rows, numbers in zip(functions, rewards.T.tolist(), strict=True)
    ]
    lengths = [torch.tensor([len(own) for own in rows], dtype=torch.int64) for rows in lists]
    steps = torch.stack(lengths).amax(0)
    offsets = torch.nn.functional.pad(torch.cumsum(steps, 0), (1, 0))
    values = torch.full((int(offsets[-1]),), torch.nan, dtype=torch.float64)
    for rows, length, own, weight in zip(lists, lengths, functions, weights.tolist(), strict=True):
        last = torch.tensor([x is None for x in own], dtype=torch.bool)
        at = spread(offsets[:-1] + torch.where(last, steps - 1, 0), length) + places(length)
        reward = weight * torch.tensor([*itertools.chain(*rows)], dtype=torch.float64)
        at, reward = at[~reward.isnan()], reward[~reward.isnan()]
        values[at] = values[at].nan_to_num(nan=0.0) + reward
    return Jagged(values, offsets)
