"""VADE (arXiv 2511.18902): chooses prompts by a Thompson draw from a decayed Beta posterior of their success rate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import ConfigError, Method, param
from rl_plugins.core.rollouts import PromptPool, Rollouts, Run, Tokens
from rl_plugins.kit.prompt_memory import SMALL, Counts, Outcomes, SuccessParams
from rl_plugins.kit.thompson import SCORES, best_draws

COUNTS = Counts(("alpha", "beta"))


class Vade(Method):
    """Variance-Aware Dynamic sampling: trains the prompts that are likely to give both right and wrong rollouts.

    Before a batch of B prompts, over all D prompts of the dataset:

        p_i ~ Beta(alpha_i + 1, beta_i + 1)          independently
        the B prompts with the largest I_i = p_i (1 - p_i)^2, or p_i (1 - p_i)

    and when its rewards are known, with r_i successes among the n_i scored rollouts of prompt i:

        prompts of the batch:   alpha_i <- selected_decay alpha_i + r_i,  beta_i <- selected_decay beta_i + n_i - r_i
        all others:             alpha_i <- unselected_decay alpha_i,      beta_i <- unselected_decay beta_i

    Symbols: alpha, beta (D,) float64 counts without the prior of 1, by dataset row. A success is a reward >=
    success_threshold (`success: threshold`), or the reward clipped to [0, 1] (`clipped_sum`).

    Special cases: rows that `select` removed count; rows without a reward (NaN) and foreign prompts (-1) do not. A
    prompt without a scored row counts as unselected, a rollout of several rows once, with their mean.

    State: alpha, beta. Draws are from `self.rng`; of more than 65,536 prompts not every p_i is drawn.

    Source: arXiv 2511.18902 and its project page VADE-RL/VADE-RL.github.io; the code that it names is missing.
    """

    name = "vade"
    fidelity = "abstract"
    does = "Chooses prompts likely to give both right and wrong rollouts, by Thompson sampling"
    problems = ("no_signal", "too_easy", "few_prompts")
    needs = frozenset({"prompt_index"})

    @dataclass(frozen=True)
    class Params(SuccessParams):
        selected_decay: float = param(0.2, "share of a prompt's older counts that remains after a visit", ge=0, le=1)
        unselected_decay: float = param(0.999, "share of other prompts' counts that remains after a batch", gt=0, le=1)
        score: Literal["p(1-p)^2", "p(1-p)"] = param("p(1-p)^2", "value that ranks the draws")
        success: Literal["threshold", "clipped_sum"] = param("threshold", "rule that turns a reward into a success")
        success_threshold: float = param(
            0.5,
            "lowest reward, the weighted sum of the functions, that counts as a success",
            only_if={"success": "threshold"},
        )

        def check(self) -> None:
            if self.unselected_decay < self.selected_decay:
                raise ConfigError(
                    f"parameter `unselected_decay` is {self.unselected_decay:g}, below `selected_decay` = "
                    f"{self.selected_decay:g}; it must be at least that, for prompts that were not visited keep more "
                    f"of their counts. Raise `unselected_decay` or lower `selected_decay`."
                )

        def successes(self, reward: Tensor) -> Tensor:
            return super().successes(reward) if self.success == "threshold" else reward.clamp(0, 1)

    def start(self, run: Run) -> None:
        assert run.dataset_size is not None  # `needs` has the prompt_index, which a stream lacks
        self.state = COUNTS.start(run.dataset_size)

    def select_prompts(self, pool: PromptPool, n: int) -> Sequence[int]:
        state = self.state
        score, rng = SCORES[self.params.score], self.rng("prompts")
        draws = best_draws(partial(COUNTS.of, state), pool.size, COUNTS.most(state), score, n, set(pool.taken), rng)
        chosen: list[int] = draws.rows.tolist()
        if self.traced:
            alpha, beta = (c + 1 for c in COUNTS.of(state, torch.from_numpy(draws.rows)))
            mean = alpha / (alpha + beta)
            std = (mean * (1 - mean) / (alpha + beta + 1)).sqrt()
            text = "posterior {mean:.2f} +- {std:.2f}, drawn {drawn:.2f}"
            self.note(chosen, text, mean=mean, std=std, drawn=draws.rates)
        return chosen

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p, state, each = self.params, self.state, rollouts.per_rollout
        seen = Outcomes.of(each.prompt_index, each.rows.mean(p.successes(rollouts.reward)))
        COUNTS.visit(state, seen.prompts, p.selected_decay, (seen.right, seen.wrong), p.unselected_decay)

        alpha, beta = COUNTS.of(state, slice(None, None, -(-len(state["alpha"]) // SMALL)))
        evidence = alpha + beta
        self.log("informative", seen.mixed.double().mean())
        self.log("posterior_mean", ((alpha + 1) / (evidence + 2)).mean())
        self.log("seen", (evidence > 0).double().mean())
        self.log("evidence", evidence[evidence > 0].mean())
