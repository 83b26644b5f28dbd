"""Which samples of a pool are kept (arXiv 2604.06916): the best and the worst."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Groups

Mode = Literal["best_worst", "mean_deviation", "extremes_random", "random"]


def places(reward: Tensor, groups: Groups, k: Tensor, mode: Mode, noise: Tensor) -> Tensor:
    """The k members of each group that are kept, in the order of the authors' code.

        best_worst       the floor(k / 2) highest, descending, then the others: the lowest, ascending
        mean_deviation   the k largest |reward - mean|, descending
        extremes_random  the highest and the lowest, in the order of the rows, then others at random
        random           any

    Args:
        reward: (rows,) float64. Rows with NaN are kept only where fewer than k have a reward, and come last.
        groups: of the rows.
        k: (groups,) members to keep; limited to 0 .. rows of the group.
        noise: (rows,) different numbers in [0, 1), for the modes with chance.

    Returns:
        (rows,) int64 place among those that are kept, from 0; -1: the row leaves. One stable sort serves both halves of
        `best_worst`, so they have no row in common: of equal rewards the earlier row is the better one.
    """
    scored = groups.n(reward).long()
    k = torch.minimum(k.long().clamp(min=0), groups.size)
    known = torch.minimum(k, scored)
    if mode == "best_worst":
        place = _best_worst(groups.place(reward), groups.rows(known), groups.rows(scored))
    else:
        place = groups.place(torch.where(torch.isnan(reward), torch.nan, _order(reward, groups, mode, noise)))
        place = torch.where(place < groups.rows(known), place, -1)
    missing = torch.isnan(reward)
    last = groups.rows(known) + groups.place(torch.where(missing, 0.0, torch.nan))
    return torch.where(missing, torch.where(last < groups.rows(k), last, -1), place)


def _best_worst(from_best: Tensor, k: Tensor, n: Tensor) -> Tensor:
    """(rows,) places.

    Args:
        from_best: (rows,) place from the highest reward.
        k, n: (rows,) members that are kept, and those with a reward, of the row's group.
    """
    best, from_worst = k // 2, n - 1 - from_best
    lower = torch.where((from_worst >= 0) & (from_worst < k - best), best + from_worst, -1)
    return torch.where(from_best < best, from_best, lower)


def _order(reward: Tensor, groups: Groups, mode: Mode, noise: Tensor) -> Tensor:
    """(rows,) numbers that fall in the order in which rows are kept."""
    if mode == "mean_deviation":
        return (reward - groups.rows(groups.mean(reward))).abs()
    if mode == "random":
        return noise
    extreme = (groups.place(reward) == 0) | (groups.place(-reward) == 0)
    row = torch.arange(len(reward), dtype=torch.float64) / max(len(reward), 1)
    return torch.where(extreme, 2 - row, noise)
