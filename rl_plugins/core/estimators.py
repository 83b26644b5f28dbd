"""The hosts' own advantage estimators for groups of any size.

A host's estimator needs equal groups. When a plan or a `select` changes that, and no method brings advantages of its
own, these take its place; on equal groups they are equal to the host's (tested).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rl_plugins.core.groups import Groups
from rl_plugins.core.rollouts import Rollouts, weighted_reward

# Relative spread up to which a reward is constant in a group: rounding of a reward computed in float32, not signal.
# Without it the step per group leaves about 1e-3 of such rounding, and in a batch without any signal the step over the
# batch scales that to 1.
_ROUNDING = 1e-6

Scale = Literal["group", "batch", "none"]


GRPO_EPS = {"trl": 1e-4, "verl": 1e-6}
"""What a host adds to the deviation that GRPO divides by."""


def grpo_advantages(rollouts: Rollouts, scale: Scale = "group", eps: float = GRPO_EPS["trl"]) -> Tensor:
    """GRPO (arXiv 2402.03300): `A = (r - mean_group) / (std + eps)`.

    Args:
        scale: `std` of the group, of all rewards of the batch, or no division at all (Dr. GRPO, arXiv 2503.20783).
        eps: see `GRPO_EPS`.

    Returns:
        (rows,) float64; 0 for rows without a reward and for groups of one.

    Raises:
        ValueError: unknown scale.
    """
    if scale not in get_args(Scale):
        raise ValueError(f"scale is {scale!r}; allowed: {', '.join(get_args(Scale))}.")
    reward, groups = rollouts.reward, rollouts.groups
    centered, std = groups.center_and_std(reward)
    if scale == "group":
        centered /= groups.rows(std + eps)
    elif scale == "batch":
        centered /= batch_std(reward) + eps
    return centered.nan_to_num_(nan=0.0)


def batch_std(x: Tensor) -> Tensor:
    """Standard deviation (divisor n - 1) of the values that are not NaN; 0 for fewer than two."""
    x = x[~torch.isnan(x)]
    return x.std() if len(x) > 1 else torch.zeros((), dtype=torch.float64)


def gdpo_advantages(
    rewards: Tensor,
    weights: Tensor,
    groups: Groups,
    eps_group: float = 1e-4,
    eps_batch: float = 1e-4,
    lengths: Tensor | None = None,
) -> Tensor:
    """GDPO (arXiv 2601.05242) for groups of any size; the formulas are in `rl_plugins.methods.gdpo`. Equal to TRL's
    "normalize_then_sum" on equal groups.

    Args:
        rewards: (rows, functions), NaN where a function gave none.
        weights: (functions,).
        groups: of the rows.
        eps_group, eps_batch: floors of the standard deviations.
        lengths: (rows,) tokens of each row for token statistics in the batch step; None for row statistics.

    Returns:
        (rows,) float64; 0 for rows without any reward and for groups of one.
    """
    columns = [
        centered_rewards(reward, groups) / (groups.rows(groups.std(reward)) + eps_group)
        for reward in rewards.double().unbind(1)
    ]
    total = weighted_reward(torch.stack(columns, dim=1), weights.double())  # NaN for rows without any reward
    count = torch.where(torch.isnan(total), 0.0, 1.0 if lengths is None else lengths.double())
    centered = total - torch.nansum(count * total) / count.sum()
    variance = torch.nansum(count * centered**2) / (count.sum() - 1).clamp(min=1)
    scale = torch.sqrt(variance) + eps_batch if lengths is None else torch.sqrt(variance + eps_batch**2)
    alone = groups.rows(groups.size == 1)
    return torch.where(torch.isnan(total) | alone, 0.0, centered / scale)


def centered_rewards(reward: Tensor, groups: Groups) -> Tensor:
    """(rows,) distance from the group's mean; exactly 0 in groups where the reward is constant, NaN stays NaN."""
    centered = reward - groups.rows(groups.mean(reward))
    size = groups.max(reward.abs()).clamp(min=1.0)
    constant = groups.max(centered.abs()) <= _ROUNDING * size
    return centered * groups.rows(~constant)
