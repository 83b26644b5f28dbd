"""The adversary over bins: exponential weights from a running score of each bin."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_plugins import Groups

Z_FLOOR, Z_LIMIT = 1e-3, 3.0


def start_scores(count: int) -> dict[str, Any]:
    """Before the first batch: `ema` and `total` (bins,) float64, of the mean losses, and `visits` (bins,) int64."""
    zero = torch.zeros(count, dtype=torch.float64)
    return {"ema": zero, "total": zero.clone(), "visits": torch.zeros(count, dtype=torch.int64)}


def update_scores(state: dict[str, Any], bin: Tensor, loss: Tensor, beta: float, norm_by_share: bool) -> None:
    """Adds the losses of a batch, in place. Bins that are absent keep their score.

    Args:
        bin: (rollouts,) int64 bin of each.
        loss: (rollouts,) float64; NaN is no loss.
        beta: weight of the new mean in `ema`; the first mean is taken whole.
        norm_by_share: a bin's mean is divided by its share of the batch's rollouts.
    """
    known = ~torch.isnan(loss)
    of_bin = Groups(bin[known], count=len(state["ema"]))
    mean, visited = of_bin.mean(loss[known]), of_bin.size > 0
    if norm_by_share:
        mean = mean * known.sum() / of_bin.size  # a bin's mean is a float64 tensor, and so is the share of the batch
    ema, first = state["ema"], state["visits"] == 0
    state["ema"] = torch.where(visited, torch.where(first, mean, (1 - beta) * ema + beta * mean), ema)
    state["total"] = state["total"] + torch.where(visited, mean, 0.0)
    state["visits"] = state["visits"] + visited.long()


def scores(state: Mapping[str, Any], form: str, zscore: bool) -> Tensor:
    """(bins,) float64 score of each bin, 0 for one that was never visited.

    Args:
        form: "ema", or "mean" of the losses of all visits.
        zscore: as deviations from the mean over the bins visited so far, in units of their population deviation.
    """
    visited = state["visits"] > 0
    value = state["ema"] if form == "ema" else state["total"] / state["visits"].clamp(min=1)
    if zscore and bool(visited.any()):
        seen = value[visited]
        value = ((value - seen.mean()) / seen.std(correction=0).clamp(min=Z_FLOOR)).clamp(-Z_LIMIT, Z_LIMIT)
    return torch.where(visited, value, 0.0)


def probabilities(score: Tensor, present: Tensor, eta: float, gamma: float) -> Tensor:
    """(bins,) q: exponential weights over the bins that are present, mixed with the uniform; 0 for those absent."""
    inside = torch.where(present, eta * score, -torch.inf)
    return torch.where(present, (1 - gamma) * torch.softmax(inside, 0) + gamma / present.sum().clamp(min=1), 0.0)


def code_weights(score: Tensor, bin: Tensor, eta: float, gamma: float, largest: float) -> Tensor:
    """(rollouts,) min(q, largest) of each rollout's bin, brought to the mean 1, and cut at `largest` again."""
    if not len(bin):
        return torch.zeros(0, dtype=torch.float64)
    q = probabilities(score, torch.bincount(bin, minlength=len(score)) > 0, eta, gamma)
    weight = q.clamp(max=largest)[bin]
    return (weight / weight.mean()).clamp(max=largest)


def paper_weights(score: Tensor, bin: Tensor, eta: float, clip: float | None, largest: float) -> Tensor:
    """(rollouts,) min(exp(eta score), largest) of each rollout's bin, the score cut at +-clip."""
    if clip is not None:
        score = score.clamp(-clip, clip)
    return torch.exp(eta * score).clamp(max=largest)[bin]
