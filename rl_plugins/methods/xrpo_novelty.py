"""XRPO's sharpening (arXiv 2510.06672): reinforces right answers more if they are unlikely for their group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Groups, Idle, Method, MethodError, MethodParams, Rollouts, Shape, Tokens, param
from rl_plugins.core.params import above


class XrpoNovelty(Method):
    """Adds a bounded bonus to the advantage of right answers that are less likely than the group's average.

    After any estimator, for rollout i of a group, with A_i > 0:

        s_i   = mean over its tokens of log pi_old
        eta_i = exp(s_i - mean of s over the group)
        A_i  <- A_i + min(max(weight (1 - eta_i), 0), cap A_i)

    So the bonus is in [0, cap A_i], and above 0 only where eta_i < 1. Advantages of 0 and below are unchanged. `weight`
    = 0 or `cap` = 0 changes nothing, and adding a constant to all log-probs does not either.

    Symbols: A (tokens,) float64, s and eta one per rollout. A rollout of several rows is one answer: its tokens count
    together. If a row's tokens have different advantages, each has its own bonus.

    Special cases: rollouts without a reward (NaN) or without a token count in no mean. Groups of equal log-probs and
    groups whose advantages are 0 are unchanged.

    Raises:
        ConfigError: the run has no old log-probs. MethodError: the host provides tokens without them. They are never
        recomputed here.

    Source: arXiv 2510.06672, as read through third parties: eta, bonus, weight 2.5 and cap 0.5.
    """

    name = "xrpo_novelty"
    fidelity = "abstract"
    does = "Gives right answers that are unlikely for their group larger advantages"
    problems = ("exploration",)
    needs = frozenset({"tokens", "old_logprobs"})
    idle = (Idle({"bonus": 0}, "no right answer is less likely than its group, or `weight` or `cap` is 0."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        weight: float = param(2.5, "lambda, largest bonus, of an answer whose likelihood is near 0", ge=0)
        cap: float = param(0.5, "kappa, largest bonus as a share of the advantage", ge=0, only_if={"weight": above(0)})

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        p = self.params
        if tokens.old_logprobs is None:
            raise MethodError(
                "the tokens have no `old_logprobs`, which novelty is computed from. Use a host "
                "that computes log-probs of the policy at the start of the step, or remove "
                "`xrpo_novelty`."
            )
        of_rollout = rollouts.per_rollout.rows.index[tokens.row]
        advantage, likelihood = tokens.advantages, relative_likelihood(rollouts, tokens)[of_rollout]
        wanted = (p.weight * (1 - likelihood)).clamp(min=0)
        positive = advantage > 0
        bonus = torch.where(positive, torch.minimum(wanted, p.cap * advantage), 0.0)
        self.log("bonus", bonus[positive].mean())
        self.log("capped", (wanted > p.cap * advantage)[positive].double().mean())
        right = Groups(of_rollout[positive])
        self.log("novel", (right.min(likelihood[positive]) < 1).double().mean())
        return Shape(advantages=advantage + bonus)


def relative_likelihood(rollouts: Rollouts, tokens: Tokens) -> Tensor:
    """eta, (rollouts,) float64: the likelihood per token over that of the group; 1 where there is none."""
    each = rollouts.per_rollout
    assert tokens.old_logprobs is not None
    mean = Groups(each.rows.index[tokens.row], count=each.rows.count).mean(tokens.old_logprobs.double())
    mean = torch.where(torch.isnan(each.reward), torch.nan, mean)
    return torch.exp(mean - each.groups.rows(each.groups.mean(mean))).nan_to_num(nan=1.0)
