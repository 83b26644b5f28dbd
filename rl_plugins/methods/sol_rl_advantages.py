"""Advantages of Sol-RL (arXiv 2604.06916): centered on the kept rollouts of a prompt, one scale for the batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Rollouts, param


class SolRlAdvantages(Method):
    """Centers rewards on the kept rollouts of the prompt and divides by the deviation of the whole batch.

        A_i = (R_i - mean of the prompt) / (sigma + eps)

    sigma is the population deviation of all rewards of the batch around their common mean (`deviation: batch`), or of
    the prompt's (`group`). Mean and sigma are those of the rollouts that are trained, not of the pool they were chosen
    from.

    Symbols: R_i reward, float64; a rollout of several rows counts once, with the mean of its rows.

    Special cases: rollouts without a reward (NaN) do not count and have the advantage 0, and so has a prompt of equal
    rewards, exactly. The advantages of a prompt sum to 0. In a batch of one prompt both deviations are the same.


    Source: arXiv 2604.06916; `PerPromptStatTracker.update` in `diffusion/flow_grpo/stat_tracking.py` of the authors'
    code.
    """

    name = "sol_rl_advantages"
    fidelity = "code"
    hosts = ("trl", "verl", "diffusion")
    does = "Centers rewards per prompt and divides by the deviation of all rewards of the batch"
    problems = ("no_signal",)

    @dataclass(frozen=True)
    class Params(MethodParams):
        deviation: Literal["batch", "group"] = param("batch", "rewards whose deviation is the scale (global_std)")
        eps: float = param(1e-4, "constant added to the deviation", gt=0)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        once = rollouts.per_rollout
        centered, sigma = once.groups.center_and_std(once.reward, ddof=0)
        if self.params.deviation == "batch":
            sigma = _deviation(once.reward).expand_as(sigma)
        if bool((~torch.isnan(once.reward)).any()):
            self.log("sigma", sigma.nanmean())
        advantage = (centered / once.groups.rows(sigma + self.params.eps)).nan_to_num(nan=0.0)
        return once.rows.rows(advantage)


def _deviation(x: Tensor) -> Tensor:
    """Population deviation of the values that are not NaN; exactly 0 where they are equal, NaN without any."""
    x = x[~torch.isnan(x)]
    return (x - x[:1]).std(correction=0) if len(x) else x.new_tensor(torch.nan)
