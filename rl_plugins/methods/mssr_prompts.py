"""MSSR's sampler: prompts of medium success rate are drawn more often."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import filterfalse, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins import PromptPool, Rollouts, Tokens, param
from rl_plugins.kit.prompt_memory import SMALL
from rl_plugins.methods.mssr.tracker import Tracked, TrackerParams

_FIRST_LOOK = 256  # rows that are looked at first
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

    State: alpha, beta, kl, and tried (dataset size,) bool. Draws are from `self.rng`.

    Logs: weight, the mean over the prompts; above 65,536 prompts over so many of them.

    Raises:
        ConfigError: a parameter out of range.

    Source: arXiv 2512.18215 and `MVSRPrioritizedSampler` in `verl/trainer/core_algos.py` of the authors' code.
    """

    name = "mssr_prompts"
    fidelity = "code"
    state_version = 3  # 2: which prompts were tried; 3: as bool, and another draw above SMALL prompts
    does = "Draws prompts with a probability that grows with the spread of their outcomes"
    problems = ("no_signal", "too_easy", "few_prompts")

    @dataclass(frozen=True)
    class Params(TrackerParams):
        priority: float = param(1.0, "exponent of the weight; 0: uniform", ge=0)

    def _initial(self, known: Tensor) -> dict[str, Any]:
        return {**super()._initial(known), "tried": ~torch.isnan(known)}

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        super().observe(rollouts, tokens, stats)
        scored = rollouts.prompt_index[~torch.isnan(rollouts.reward) & (rollouts.prompt_index >= 0)]
        self.state["tried"].index_fill_(0, scored, True)

    def select_prompts(self, pool: PromptPool, n: int) -> Sequence[int]:
        largest = (0.5 + _FLOOR) ** self.params.priority
        chosen = weighted_draw(self._weights, largest, pool.size, n, set(pool.taken), self.rng("prompts"))
        if not pool.taken:
            few = pool.size <= SMALL
            seen = (
                torch.arange(pool.size) if few else torch.from_numpy(self.rng("seen").integers(pool.size, size=SMALL))
            )
            self.log("weight", self._weights(seen).mean())
        if self.traced:
            value, weight = self._value(torch.tensor(chosen)), self._weights(torch.tensor(chosen))
            self.note(chosen, "value {value:.2f}, weight {weight:.2g}", value=value, weight=weight)
        return chosen

    def _value(self, prompts: Tensor) -> Tensor:
        return torch.where(self.state["tried"][prompts], self._values(prompts), 0.5)

    def _weights(self, prompts: Tensor) -> Tensor:
        """(n,) weight of these dataset rows."""
        value = self._value(prompts)
        return (torch.sqrt(value * (1 - value)) + _FLOOR) ** self.params.priority


def weighted_draw(
    weights: Callable[[Tensor], Tensor], largest: float, size: int, n: int, taken: set[int], rng: np.random.Generator
) -> list[int]:
    """n different rows, drawn one after the other with probabilities in proportion to their weights.

    Up to `SMALL` rows the smallest of exponential variables / weight are such a sample. Above, rows are drawn uniformly
    and accepted with the probability of their weight; a row that was accepted before is passed over. That gives the
    same distribution and looks at few rows, unless nearly all weights are small: what then is missing is drawn from the
    other rows as up to `SMALL`.

    Args:
        weights: (rows,) int64 -> their weights, > 0. largest: none is above it.
        taken: rows that are not wanted; with the same generator, the answer continues the same draw.
        n: at most size - len(taken).
    """
    found, looked = dict[int, None](), _FIRST_LOOK
    while size > SMALL and looked <= size // 8:
        rows = rng.integers(size, size=looked)
        accepted = rng.random(looked) * largest < weights(torch.from_numpy(rows)).numpy()
        found |= dict.fromkeys(rows[accepted].tolist())
        chosen = list(islice(filterfalse(taken.__contains__, found), n))
        if len(chosen) == n:
            return chosen
        looked *= 2
    arrival = rng.exponential(size=size) / weights(torch.arange(size)).numpy()
    arrival[list(found.keys() | taken)] = np.inf
    chosen = list(filterfalse(taken.__contains__, found))
    missing = n - len(chosen)
    if missing:
        near = np.flatnonzero(arrival <= np.partition(arrival, missing - 1)[missing - 1])
        chosen += near[np.argsort(arrival[near], kind="stable")][:missing].tolist()
    return chosen
