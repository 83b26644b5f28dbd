"""The loss of M-GRPO (arXiv 2511.13288): one importance ratio for a whole trajectory."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Terms, param
from rl_plugins.core.losses import Live, ppo_clip


class MGrpoRatio(Method):
    """PPO's clipped surrogate with the ratio of the trajectory: the product of the ratios of all its tokens.

    Per row, with r = exp(sum_t (lp_t - lp_old_t)) over its trained tokens:

        loss = -min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)

    Every trained token of the row has this loss, so where the host averages tokens in a row and then rows, the update
    is the paper's: the mean over trajectories. The ratio is not taken to the power 1 / length, as GSPO does. A
    trajectory of some hundred tokens leaves the clip range after a small update, and then it has no gradient.

    Symbols: lp, lp_old, A (rows, time), log-probs in nats; the gradient flows through lp only, and from every token to
    all tokens of its row. The log of r is cut at 20 in absolute value.

    Special cases: masked tokens have loss and gradient 0 for any value. On-policy r = 1 and nothing is clipped.

    Source: arXiv 2511.13288v2, eq. 14 to 17. The paper has one clip range without its value; the defaults are those of
    the authors' code, which clips the ratio of each token.
    """

    name = "m_grpo_ratio"
    fidelity = "paper"
    does = "Clips one importance ratio per trajectory, the product of the ratios of its tokens"
    problems = ("agents",)
    needs = frozenset({"several_updates"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        clip_low: float = param(0.2, "lower clip range: the ratio is clipped at 1 - clip_low", ge=0, lt=1)
        clip_high: float = param(0.28, "upper clip range: the ratio is clipped at 1 + clip_high", ge=0)

    def policy_loss(self, terms: Terms) -> Tensor:
        p, live = self.params, Live(terms)
        lp, old, adv = live.all("logprobs", "old_logprobs", "advantages")
        log_ratio = (lp - old).sum(1, keepdim=True)
        loss = ppo_clip(log_ratio, torch.zeros_like(log_ratio), adv, p.clip_low, p.clip_high)
        ratio = torch.exp(log_ratio.detach())
        clipped = ((adv > 0) & (ratio > 1 + p.clip_high)) | ((adv < 0) & (ratio < 1 - p.clip_low))
        live.log_means(self, clipped=clipped, log_ratio=log_ratio.abs().expand_as(adv))
        return loss
