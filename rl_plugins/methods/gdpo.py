"""GDPO (arXiv 2601.05242): normalizes each reward function separately before adding them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Method, MethodError, MethodParams, Rollouts, param
from rl_plugins.core.estimators import centered_rewards, gdpo_advantages
from rl_plugins.core.rollouts import weighted_reward


class Gdpo(Method):
    """Normalizes each reward inside its group, adds them with their weights, and normalizes the sum over the batch.

    With r^k_i the reward of function k for rollout i and w_k its weight (the host's reward weights):

        1. group   A^k_i = (r^k_i - mean_group r^k) / (std_group r^k + eps_group)      std with divisor n - 1
        2. sum     S_i   = sum_k w_k A^k_i
        3. batch   A_i   = (S_i - mean_batch S) / (std_batch S + eps_batch)

    In line 3 `batch_stat: row` counts every rollout once, divisor N - 1. `batch_stat: token` counts it once per token:
    with lengths L_i,

        mean = sum L S / sum L,   var = sum L (S - mean)^2 / (sum L - 1),   A = (S - mean) / sqrt(var + eps_batch^2)

    Symbols: rewards (rows, functions), advantages (rows,), float64.

    Special cases: a reward that a function did not give (NaN) is left out of that function's statistics and adds 0
    (`nan_policy: exclude`), or counts as a reward of 0 (`nan_policy: zero`). A row without any reward has advantage 0;
    with "exclude" it is left out of line 3, with "zero" it counts in the statistics as zeros. A withdrawn row counts
    nowhere. A reward that is constant in a group adds 0. Groups of one have advantage 0, with a warning.

    Raises:
        MethodError: another method changed the reward; GDPO reads the reward functions, not their sum.

    Source: arXiv 2601.05242; grpo_trainer.py of the authors' TRL fork (row form) and ray_trainer.py of verl-GDPO (token
    form).
    """

    name = "gdpo"
    fidelity = "code"
    hosts = ("trl", "verl", "diffusion")
    does = "Normalizes each reward function within its group before adding them"
    problems = ("several_rewards",)
    needs = frozenset({"several_rewards", "several_rollouts"})
    host_options = {"trl": {"multi_objective_aggregation": "sum_then_normalize"}}

    @dataclass(frozen=True)
    class Params(MethodParams):
        eps_group: float = param(1e-4, "constant added to the standard deviation of a reward in its group", gt=0)
        eps_batch: float = param(1e-4, "constant added to the standard deviation of the sum over the batch", gt=0)
        batch_stat: Literal["row", "token"] = param("row", "unit of line 3: a rollout (paper) or a token (verl fork)")
        nan_policy: Literal["exclude", "zero"] = param("exclude", "a reward that was not given: left out, or 0 (code)")

    def advantages(self, rollouts: Rollouts) -> Tensor:
        p, groups = self.params, rollouts.groups
        rewards = self._rewards(rollouts)
        advantages = gdpo_advantages(
            rewards,
            rollouts.reward_weights,
            groups,
            eps_group=p.eps_group,
            eps_batch=p.eps_batch,
            lengths=rollouts.length if p.batch_stat == "token" else None,
        )
        for name, reward in zip(rollouts.reward_names, rewards.unbind(1), strict=True):
            spread = groups.max(centered_rewards(reward, groups).abs())
            self.log(f"constant/{name}", (spread == 0)[~torch.isnan(spread)].double().mean())
        if len(advantages):
            self.log("max_abs_advantage", advantages.abs().max(), "max")
        if bool((groups.size == 1).any()):
            self.warn("a group has a single row; there is nothing to compare it with, so its advantage is 0.")
        return advantages

    def _rewards(self, rollouts: Rollouts) -> Tensor:
        """(rows, functions), with NaN where a reward is to be left out."""
        rewards, reward = rollouts.rewards, rollouts.reward
        given = weighted_reward(rewards, rollouts.reward_weights)
        withdrawn = torch.isnan(reward) & ~torch.isnan(given)
        if not torch.allclose(torch.where(withdrawn, reward, given), reward, rtol=1e-5, atol=1e-6, equal_nan=True):
            raise MethodError(
                "another method changed the reward, but GDPO reads each reward function and not "
                "their sum, so the change would be lost. Remove `gdpo` or the method that changes "
                "rewards from `methods`, or make that reward a reward function of its own."
            )
        if self.params.nan_policy == "zero":
            rewards = torch.nan_to_num(rewards, nan=0.0)
        return torch.where(withdrawn[:, None], torch.nan, rewards)
