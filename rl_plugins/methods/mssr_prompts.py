"""MSSR's sampler: prompts of medium success rate are drawn more often."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins import PromptPool, Rollouts, Tokens, param
from rl_plugins.methods.mssr.tracker import Tracked, TrackerParams

_FLOOR = 1e-6  # a prompt that always or never succeeds keeps a chance


class MssrPrompts(Tracked):
    """The priority sampler of MSSR: draws prompts in proportion to the standard deviation of their outcome.

    The B prompts of a batch are drawn one after the other, without replacement, with probabilities in proportion to

        weight_x = (sqrt(v_x (1 - v_x)) + 1e-6)^priority          v_x = a_x / (a_x + b_x)
        weight_x = (0.5 + 1e-6)^priority                          of a prompt that was never tried: none has a larger

    with the counts a, b of `mssr_baseline`: a <- rho a + o, b <- rho b + 1 - o for every outcome o = 1[reward >
    success_threshold]. rho follows the KL to the reference policy unless `rho` fixes it. The sampler keeps its own
    counts, so it also works with another estimator and any number of rollouts. A prompt is tried when a rollout of it
    was scored, or `value_column` has a value for it (the authors' first pass over the dataset). `priority: 0` draws
    uniformly.

    Symbols: v, weights, counts (dataset size,) float64.

    Special cases: a batch that is not full asks again, and the draw continues where it stopped.

    State: alpha, beta, kl, and tried (dataset size,) 0 or 1. One draw of exponential variables per generation batch,
    from `self.rng`: the smallest of variable / weight are a sample without replacement.

    Raises:
        ConfigError: a parameter out of range.

    Source: arXiv 2512.18215 and `MVSRPrioritizedSampler` in `verl/trainer/core_algos.py` of the authors' code.
    """

    name = "mssr_prompts"
    fidelity = "code"
    state_version = 2  # which prompts were tried
    does = "Draws prompts with a probability that grows with the spread of their outcomes"
    problems = ("no_signal", "few_prompts")

    @dataclass(frozen=True)
    class Params(TrackerParams):
        priority: float = param(1.0, "exponent of the weight; 0: uniform", ge=0)

    def _initial(self, known: Tensor) -> dict[str, Any]:
        return {**super()._initial(known), "tried": (~torch.isnan(known)).double()}

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        super().observe(rollouts, tokens, stats)
        scored = rollouts.prompt_index[~torch.isnan(rollouts.reward) & (rollouts.prompt_index >= 0)]
        self.state["tried"].index_fill_(0, scored, 1.0)

    def select_prompts(self, pool: PromptPool, n: int) -> Sequence[int]:
        value = torch.where(self.state["tried"] > 0, self._values(torch.arange(pool.size)), 0.5)
        weight = (torch.sqrt(value * (1 - value)) + _FLOOR) ** self.params.priority
        if not pool.taken:
            self.log("weight", weight.mean())
        arrival = torch.from_numpy(self.rng("prompts").exponential(size=pool.size)) / weight
        arrival[list(pool.taken)] = torch.inf
        chosen: list[int] = torch.sort(arrival, stable=True).indices[:n].tolist()
        self.note(chosen, "value {value:.2f}, weight {weight:.2g}", value=value[chosen], weight=weight[chosen])
        return chosen
