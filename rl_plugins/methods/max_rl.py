"""MaxRL (arXiv 2602.02710): divides centered rewards by the mean of their group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Rollouts, param


class MaxRl(Method):
    """Maximum likelihood RL: weighs a prompt by one over its success rate, which approximates the gradient of log p.

    With rewards r_1 .. r_G of a prompt, 0 or 1 for wrong or right:

        A_i = (r_i - mean r) / (mean r + eps)

    With K right rollouts of G a right one has G / K - 1 and a wrong one -1, so of 4 rollouts with one success the
    advantages are 3, -1, -1, -1. GRPO divides by the deviation instead. In expectation the gradient is that of the
    series sum_k (1/k) pass@k up to k = G.

    Symbols: r, A (rows,) float64.

    Special cases: a group whose mean is not above 0 has A = 0; where its rewards differ, which takes negative ones, a
    warning says so. Equal rewards give 0. NaN rewards are left out of the mean and have A = 0; a group with a single
    reward has A = 0. A rollout of several rows counts once, with the mean of their rewards.

    Source: arXiv 2602.02710, equation 10; `compute_maxrl_outcome_advantage` in `verl/trainer/ppo/core_algos.py` of the
    authors' code.
    """

    name = "max_rl"
    fidelity = "code"
    does = "Divides centered rewards by their group's mean, so that hard prompts weigh more"
    problems = ("exploration", "too_hard")
    needs = frozenset({"several_rollouts"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        eps: float = param(1e-6, "constant added to the mean of a group", gt=0)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        each = rollouts.per_rollout
        groups, reward = each.groups, each.reward
        centered, spread = groups.center_and_std(reward)
        mean = groups.mean(reward)
        if bool(((mean <= 0) & (spread > 0)).any()):
            self.warn(
                "a group has rewards whose mean is 0 or less, so its advantages are 0. Rewards must be 0 for wrong and "
                "positive for right; give rewards without negative values."
            )
        self.log("groups_with_success", (mean > 0)[groups.n(reward) > 0].double().mean())
        used = groups.rows((mean > 0) & (spread > 0))
        return each.rows.rows(
            torch.where(used, centered / (groups.rows(mean) + self.params.eps), 0.0).nan_to_num(nan=0.0)
        )
