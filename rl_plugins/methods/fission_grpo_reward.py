"""Fission-GRPO's reward (arXiv 2601.15625): format counts more at first, the right call later."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import ConfigError, Method, MethodParams, Rollouts, Run, param


class FissionReward(Method):
    """Changes the weights of format and correctness over the run, with a constant total.

    Reconstruction: the form is the paper's. The curves of its weights were not published (last look 2026-11-26); the
    straight lines here are ours.

        R = (w_fmt R_fmt + w_corr R_corr + R_len) / 3
        w_corr = start + progress (end - start),   w_fmt = 2 - w_corr,   progress = batch / batches of the run

    If each of R_fmt, R_corr, R_len is in [0, 1], so is R, and its largest value is 1 throughout. `correctness` in
    `rl_plugins.methods.fission_grpo` is a reward for calls: half the functions, half the arguments.

    Symbols: rewards (rows, functions), R (rows,), float64. R_fmt, R_corr, R_len are the run's reward functions named
    `format`, `correctness` and `length`; without one for the length R_len is 1. Other reward functions and the host's
    weights are not used. A row that lacks one of the three has no reward (NaN).

    Raises:
        ConfigError: a reward function of these names does not exist, or two are the same.

    Source: arXiv 2601.15625, as independent notes report it.
    """

    name = "fission_grpo_reward"
    fidelity = "reconstruction"
    does = "Shifts the reward weight from format to correctness during the run"
    problems = ("several_rewards", "agents")
    needs = frozenset({"several_rewards"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        format: str = param("format", "name of the reward function for the format")
        correctness: str = param("correctness", "name of the reward function for the right call")
        length: str | None = param(None, "name of the reward function for the length; none: R_len is 1")
        start: float = param(0.5, "weight of correctness at the start (ours)", ge=0, le=2)
        end: float = param(1.5, "weight of correctness at the end (ours)", ge=0, le=2)

        @property
        def names(self) -> list[str]:
            return [n for n in (self.format, self.correctness, self.length) if n is not None]

        def check(self) -> None:
            if len(set(self.names)) < len(self.names):
                same = ", ".join(self.names)
                raise ConfigError(
                    f"`format`, `correctness` and `length` name {same}; they must be different functions."
                )

    def check(self, run: Run) -> None:
        missing = [n for n in self.params.names if n not in run.reward_names]
        if run.reward_names and missing:
            raise ConfigError(
                f"there is no reward function {', '.join(f'`{n}`' for n in missing)}; the run has "
                f"{', '.join(run.reward_names)}. Name yours with `format`, `correctness` and `length`."
            )

    def start(self, run: Run) -> None:
        self._batches = max(1, run.total_batches)

    def rewards(self, rollouts: Rollouts) -> Tensor:
        p = self.params
        progress = min(rollouts.batch / self._batches, 1.0)
        weight = p.start + progress * (p.end - p.start)
        self.log("weight_correctness", weight)

        def of(name: str) -> Tensor:
            return rollouts.rewards[:, rollouts.reward_names.index(name)]

        length = torch.ones(len(rollouts), dtype=torch.float64) if p.length is None else of(p.length)
        return ((2 - weight) * of(p.format) + weight * of(p.correctness) + length) / 3
