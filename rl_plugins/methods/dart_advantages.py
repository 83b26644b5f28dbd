"""Advantages of DART (arXiv 2509.23866): GRPO over the steps of a group."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Rollouts, from_params, param, signals


class DartAdvantages(Method):
    """GRPO in which every step of a rollout counts in the statistics of its group.

        mean = sum k_i R_i / K,   std = sqrt(sum k_i (R_i - mean)^2 / (K - 1)),   K = sum k_i
        A_i  = (R_i - mean) / (std + eps),   for every token of rollout i

    k_i is the number of steps (turns) of rollout i with `group_stats: step`, and 1 with `trajectory`. A long rollout
    counts more with `step`: in the authors' code every step is a row of the group.

    Symbols: R_i reward, float64; steps are turns of the agent.

    Special cases: rollouts without a reward (NaN) are out of the statistics and have the advantage 0. A group with
    K = 1, or of equal rewards, has the advantage 0. A rollout without a turn has k = 1. A rollout of several rows
    counts with the turns of all of them; with `trajectory` it counts once.

    Source: arXiv 2509.23866, section on step-wise GRPO; verl/trainer/ppo/core_algos.py of dart-gui, where step rows
    carry the task as uid.
    """

    name = "dart_advantages"
    fidelity = "paper"
    does = "Compares rollouts of a group with each step counted, so that long rollouts weigh more"
    problems = ("agents",)
    needs = from_params(lambda p: signals(turns=p.group_stats == "step"))

    @dataclass(frozen=True)
    class Params(MethodParams):
        group_stats: Literal["step", "trajectory"] = param("step", "unit that counts in mean and deviation")
        eps: float = param(1e-6, "constant added to the standard deviation", gt=0)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        groups, reward = rollouts.groups, rollouts.reward
        scored = ~torch.isnan(reward)
        weight = torch.where(scored, self._weight(rollouts), torch.nan)
        anchor = groups.rows(groups.min(reward))  # equal rewards have exactly the deviation 0
        total, x = groups.sum(weight), reward - anchor
        shift = groups.sum(weight * x) / total
        centered = x - groups.rows(shift)
        variance = groups.sum(weight * centered * centered) / (total - 1)
        std = torch.where(total > 1 + 1e-9, variance.clamp(min=0).sqrt(), torch.inf)
        if bool(scored.any()):
            self.log("steps", weight[scored].mean())
            self.log("mean_shift", (shift - groups.mean(x)).abs().nanmean())
        return (centered / groups.rows(std + self.params.eps)).nan_to_num(nan=0.0)

    def _weight(self, rollouts: Rollouts) -> Tensor:
        """(rows,) steps of each row, or what makes its rollout count once."""
        if self.params.group_stats == "trajectory":
            return rollouts.per_rollout.row_weight(rollouts.reward)
        assert rollouts.turns is not None  # in `needs`
        return torch.bincount(rollouts.turns.row, minlength=len(rollouts)).clamp(min=1).double()
