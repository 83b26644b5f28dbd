"""The two stages of Sol-RL (arXiv 2604.06916): explore seeds cheaply, make the best and worst of them again."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from torch import Tensor

from rl_plugins import (
    ConfigError,
    Groups,
    Idle,
    Method,
    MethodParams,
    Program,
    Prompt,
    Run,
    Score,
    from_params,
    param,
    signals,
)
from rl_plugins.core.denoising import Denoise, Sample, SamplePrompt
from rl_plugins.kit.oversampling import pool_size
from rl_plugins.methods.sol_rl.choice import Mode, places


class SolRlExplore(Method):
    """Explores many seeds with a cheap copy and few steps, and makes the best and worst of them with the policy.

    For k samples of a prompt, P = ceil(pool k) seeds:

        1. explore   noise from each seed, `steps` denoising steps of the cheap copy, reward d_1 .. d_P
        2. choose    the floor(k / 2) seeds with the highest d, and the k - floor(k / 2) with the lowest
        3. make      noise from the same k seeds, all steps of the policy, rewards R_1 .. R_k

    Rows are the samples of line 3; nothing of line 1 reaches the loss or the logged reward. Other modes of the choice
    are those of `sol_rl_select`.

    Symbols: k is what the plan asks for, spare samples of other methods included.

    Special cases: explored samples without a reward (NaN) are chosen only where fewer than k have one.

    State: none; all seeds of a prompt differ, and follow from the seed of the run, the batch and the prompt.

    Raises:
        ConfigError: more steps than a sample has, or no cheap copy.

    Source: arXiv 2604.06916; `_rollout_for_one_prompt` in `train_scripts/sol_rl/train_sd3.py` of the authors' code.
    """

    name = "sol_rl_explore"
    fidelity = "abstract"
    hosts = ("diffusion",)
    does = "Explores many seeds with a cheap copy of the policy and makes the best and worst again"
    problems = ("few_rollouts",)
    needs = from_params(lambda p: signals(cheap_copy=p.model == "cheap"))
    idle = (Idle({"explored_std": 0}, "all explored samples have one reward. Look at the reward, or raise `steps`."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        pool: float = param(4.0, "P / k, explored seeds per sample that is made (paper: 96 for 24)", ge=1)
        steps: int = param(6, "denoising steps of an explored sample (paper: 6, then 10)", ge=1)
        model: Literal["cheap", "policy"] = param("cheap", "model that explores")
        mode: Mode = param("best_worst", "seeds of the pool that are made again")
        noise: bool = param(False, "noise on the way of explored samples (paper: none)")

    def check(self, run: Run) -> None:
        if run.host == "diffusion" and self.params.steps > run.max_completion_length:
            raise ConfigError(
                f"samples are explored in {self.params.steps} steps, and made in {run.max_completion_length}. Lower "
                f"`steps`, or raise that of the run."
            )

    def rollout(self, prompt: Prompt) -> Program:
        return cast(Program, self._samples(cast(SamplePrompt, prompt)))

    def _samples(self, prompt: SamplePrompt) -> Generator[Any, Any, Sequence[Sample]]:
        seeds = prompt.seeds(pool_size(prompt.n, self.params.pool))
        explored = None
        if len(seeds) > prompt.n:
            seeds, explored = yield from self._chosen(prompt, seeds)
        made = yield [Denoise(prompt.start(seed), stochastic=prompt.stochastic) for seed in seeds]
        samples = [x for (x,) in made]
        scored = yield [Score(x) for x in samples]
        if explored is not None:
            self._report(explored, torch.tensor([s.reward for s in scored], dtype=torch.float64))
        return [x.scored(s) for x, s in zip(samples, scored, strict=True)]

    def _chosen(self, prompt: SamplePrompt, seeds: list[int]) -> Generator[Any, Any, tuple[list[int], Tensor]]:
        """The seeds that are made again, in the order of the choice, and what their explored samples got."""
        p = self.params
        tried = yield [Denoise(prompt.start(s, p.steps), stochastic=p.noise, model=p.model) for s in seeds]
        scored = yield [Score(x) for (x,) in tried]
        reward = torch.tensor([s.reward for s in scored], dtype=torch.float64)
        if bool((~torch.isnan(reward)).any()):
            self.log("explored_reward", reward.nanmean())
        one = Groups.one(len(reward))
        self.log("explored_std", one.std(reward, ddof=0).nan_to_num().mean())
        noise = torch.from_numpy(prompt.rng("kept").random(len(reward)))
        place = places(reward, one, torch.tensor([prompt.n]), p.mode, noise)
        kept = torch.argsort(torch.where(place < 0, len(place), place), stable=True)[: prompt.n]
        return [seeds[i] for i in kept.tolist()], reward[kept]

    def _report(self, cheap: Tensor, exact: Tensor) -> None:
        known = ~(torch.isnan(cheap) | torch.isnan(exact))
        if not bool(known.any()):
            return
        cheap, exact = cheap[known], exact[known]
        self.log("kept_cheap_reward", cheap.mean())
        self.log("kept_exact_reward", exact.mean())
        self.log("gap", (exact - cheap).abs().mean())
        one = Groups.one(len(cheap))
        x, y = (v - v.mean() for v in (one.rank(cheap), one.rank(exact)))
        size = (x.square().sum() * y.square().sum()).sqrt()
        if size > 0:  # not where all are equal
            self.log("rank_correlation", (x * y).sum() / size)
