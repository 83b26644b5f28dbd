"""The hosts' own advantage estimators for groups of any size.

A host's estimator needs equal groups. When a plan or a `select` changes that, and no method brings advantages of its
own, these take its place; on equal groups they are equal to the host's (tested).
"""

from __future__ import annotations

from typing import Literal, get_args

import torch
from torch import Tensor

from rl_plugins.rollouts import Rollouts

Scale = Literal["group", "batch", "none"]


def grpo_advantages(rollouts: Rollouts, scale: Scale = "group", eps: float = 1e-4) -> Tensor:
    """GRPO (arXiv 2402.03300): `A = (r - mean_group) / (std + eps)`.

    Args:
        scale: `std` of the group, of all rewards of the batch, or no division at all (Dr. GRPO, arXiv 2503.20783).
        eps: 1e-4 in TRL, 1e-6 in verl.

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
