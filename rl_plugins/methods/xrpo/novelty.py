"""XRPO's sharpening (arXiv 2510.06672): reinforces right answers more if they are unlikely for their group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins.errors import MethodError
from rl_plugins.groups import Groups
from rl_plugins.method import Idle, Measured, Method
from rl_plugins.methods.xrpo.allocator import PAPER
from rl_plugins.params import MethodParams, above, param
from rl_plugins.rollouts import Rollouts, Shape, Tokens


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

    Logs: `bonus`, mean bonus of the tokens with A > 0; `capped`, share of them at the cap; `novel`, share of the
    rollouts with eta < 1 among those with A > 0.

    Raises:
        ConfigError: the run has no old log-probs. MethodError: the host provides tokens without them. They are never
        recomputed here.

    Source: arXiv 2510.06672, as read through third parties: eta, bonus, weight 2.5 and cap 0.5.
    """

    name = "xrpo_novelty"
    paper = PAPER
    fidelity = "paper"
    does = "Gives right answers that are unlikely for their group larger advantages"
    problems = ("exploration",)
    measured = (
        Measured(
            "entropy of right answers at a pass rate of 0.9, minus GRPO",
            "better",
            "+0.060 ± 0.009",
            "xrpo-10-seeds",
        ),
        Measured(
            "batches until a pass rate of 0.9",
            "not told apart",
            "69.9 ± 3.0 against 66.6 ± 2.8 (GRPO)",
            "xrpo-10-seeds",
        ),
    )
    goes_with = {
        "xrpo_allocate": "The paper's XRPO: rollouts go where the pass rate is least certain.",
        "xrpo_seeds": "The paper's XRPO: failed prompts are tried again with solved examples.",
    }
    use_when = "Rewards are right or wrong, and the policy's right answers become all alike."
    avoid_when = (
        "Right answers are the likely ones, as in the demo: 3 in 100 of them are less likely than their group "
        "(watch xrpo_novelty/novel), so nothing can be sharpened."
    )
    cost = (
        "No extra rollouts. Needs old log-probs: in TRL one extra forward pass per batch where TRL does not "
        "compute them, in verl none."
    )
    disagreements = (
        "The paper was read through a review, a dump of its discussion and a third party's code, not in full.",
        "A third party's code gives the bonus to wrong answers, too (|A| in place of A), which reviews of the paper "
        "contradict. It is not offered.",
        "Whether the mean of s is over the whole group or its right answers could not be read: it is the whole group, "
        "as in that code.",
    )
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
        of_rollout = rollouts.once.rows.index[tokens.row]
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
    each = rollouts.once
    assert tokens.old_logprobs is not None
    mean = Groups(each.rows.index[tokens.row], count=each.rows.count).mean(tokens.old_logprobs.double())
    mean = torch.where(torch.isnan(each.reward), torch.nan, mean)
    return torch.exp(mean - each.groups.rows(each.groups.mean(mean))).nan_to_num(nan=1.0)
