"""Prompt-GDRO of arXiv 2601.19280: advantages of hard bins count more."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch

from rl_plugins import Idle, Rollouts, Run, Shape, Tokens, param
from rl_plugins.kit.start_checks import refuse_one_prompt
from rl_plugins.methods._gdro.bins import Binned, BinParams
from rl_plugins.methods._gdro.weights import code_weights, paper_weights, scores, start_scores, update_scores

MOST_LOGGED = 16  # bins with metrics of their own
_CODE = {"weight_form": "code"}


class GdroPrompt(Binned):
    """Weights bins of difficulty by their loss and multiplies the advantages by these weights.

    Prompts are put into bins b by their running pass@k (`_gdro.bins`). With l(b) the mean of 1 - reward over the
    rollouts of a bin in a batch, divided by the bin's share of them with `norm_by_share`:

        S(b) <- l(b) at the first visit, then (1 - beta) S(b) + beta l(b)      score: ema
        S(b) =  mean of l(b) over the visits                                    score: mean
        q(b) =  (1 - gamma) exp(eta S(b)) / sum of those in the batch + gamma / bins in the batch

        weight_form code:   w = min(q(b), largest); w <- w / mean over the rollouts; w <- min(w, largest)
        weight_form paper:  w = min(exp(eta clip(S(b), -score_clip, score_clip)), largest)
        A <- A w            after any estimator

    The scores are those before the batch, 0 without a visit. `zscore` puts (S - mean) /
    max(deviation, 1e-3), cut at +-3, over the visited bins in place of S.

    Symbols: w (rollouts,), S, q (bins,) float64; beta = `score_beta`, largest = `largest_weight`. Rollouts count once.

    Special cases: rollouts without a reward (NaN) count in no score and no pass@k, but are weighted. Foreign prompts
    and rows that `select` removed are not weighted; the latter count in scores.

    State: the scores, and history and bin of every prompt.

    Raises:
        ConfigError: edges out of order.

    Source: arXiv 2601.19280, equations 6 to 12; `verl/trainer/group_dro_grpo.py` of the authors' code at b391899b.
    """

    name = "gdro_prompt"
    does = "Weights advantages by difficulty, giving bins of prompts with a high loss more weight"
    problems = ("few_prompts",)
    idle = (Idle({"spread": 0.0}, "all weights are equal. `eta` is 0, or all prompts are in one bin (`edges`)."),)

    @dataclass(frozen=True)
    class Params(BinParams):
        weight_form: Literal["code", "paper"] = param("code", "mean 1 (code), or exponential weights unchanged (paper)")
        eta: float = param(0.65, "eta, influence of a bin's score", ge=0)
        gamma: float = param(0.01, "uniform share of q", ge=0, le=1, only_if=_CODE)
        largest_weight: float = param(15.0, "largest weight of a bin", gt=0)
        score: Literal["ema", "mean"] = param("ema", "running mean of a bin's losses, or mean over its visits")
        score_beta: float = param(0.12, "weight of a new loss", gt=0, le=1, only_if={"score": "ema"})
        score_clip: float | None = param(None, "limit of |S|; none: no limit", gt=0, only_if={"weight_form": "paper"})
        zscore: bool = param(False, "standardization of scores over the bins seen so far")
        norm_by_share: bool = param(True, "division of a bin's loss by its share of the batch")

    def check(self, run: Run) -> None:
        if self.params.weight_form == "code":
            refuse_one_prompt(run, "its weight, whose mean over the batch is 1, is always 1")

    def start(self, run: Run) -> None:
        super().start(run)
        self.state["scores"] = start_scores(self.params.count)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        p, each = self.params, rollouts.per_rollout
        own = each.prompt_index >= 0
        bin = self.bins_of(each.prompt_index[own])
        score = scores(self.state["scores"], p.score, p.zscore)
        if p.weight_form == "code":
            found = code_weights(score, bin, p.eta, p.gamma, p.largest_weight)
        else:
            found = paper_weights(score, bin, p.eta, p.score_clip, p.largest_weight)
        if not len(found):
            return None
        self.log("largest", found.max(), "max")
        self.log("smallest", found.min(), "min")
        self.log("spread", found.max() - found.min())
        for number in torch.unique(bin).tolist()[:MOST_LOGGED]:
            name, inside = self.bin_name(number), bin == number
            self.log(f"weight/{name}", found[inside][0])
            self.log(f"share/{name}", inside.double().mean())
            self.log(f"score/{name}", score[number])
        weight = torch.ones(len(own), dtype=torch.float64)
        weight[own] = found
        return Shape(row_factor=each.rows.rows(weight))

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        p, each = self.params, rollouts.per_rollout
        own = each.prompt_index >= 0
        loss = 1 - each.reward[own]
        update_scores(self.state["scores"], self.bins_of(each.prompt_index[own]), loss, p.score_beta, p.norm_by_share)
        self.remember(rollouts)
