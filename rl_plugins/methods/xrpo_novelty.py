"""XRPO's sharpening (arXiv 2510.06672): reinforces right answers more if they are unlikely for their group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Groups, Idle, Method, MethodError, MethodParams, Rollouts, Shape, Tokens, param
from rl_plugins.core.groups import empty, parts
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
        before, rows = tokens.advantages, rollouts.per_rollout.rows
        likelihood = relative_likelihood(rollouts, tokens)
        wanted_of_row = rows.rows((p.weight * (1 - likelihood)).clamp(min=0))
        after, counts = empty(len(before)), torch.zeros(3, dtype=torch.float64)
        for part in parts(len(tokens)):
            row, a = tokens.row[part], before[part]
            wanted, cap = wanted_of_row.index_select(0, row), p.cap * a
            bonus = torch.minimum(wanted, cap).clamp_(min=0)  # 0 where A is not above 0
            torch.add(a, bonus, out=after[part])
            positive = a > 0
            counts += torch.stack([bonus.sum(), *map(torch.count_nonzero, (positive, positive & (wanted > cap)))])
        bonus_sum, tokens_right, capped = counts
        self.log("bonus", bonus_sum / tokens_right)
        self.log("capped", capped / tokens_right)
        self.log(
            "novel", (likelihood[rows.max(Groups(tokens.row, count=len(rollouts)).max(before)) > 0] < 1).double().mean()
        )
        return Shape(advantages=after)


def relative_likelihood(rollouts: Rollouts, tokens: Tokens) -> Tensor:
    """eta, (rollouts,) float64: the likelihood per token over that of the group; 1 where there is none."""
    each, of_row, logprobs = rollouts.per_rollout, Groups(tokens.row, count=len(rollouts)), tokens.old_logprobs
    assert logprobs is not None
    mean, n = of_row.mean(logprobs), of_row.n(logprobs)
    rows = each.rows.mean(mean)  # that of the tokens, where all rows have as many
    deviation = each.rows.sum(n * (mean - each.rows.rows(rows)))
    mean = rows + deviation / each.rows.sum(n)
    mean = torch.where(torch.isnan(each.reward), torch.nan, mean)
    return torch.exp(mean - each.groups.rows(each.groups.mean(mean))).nan_to_num(nan=1.0)
