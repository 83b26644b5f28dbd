"""AEPO's clipping: a token with a positive advantage keeps its gradient beyond the clip range."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Terms, param
from rl_plugins.core.losses import LOG_RATIO_LIMIT, Live


class AepoClip(Method):
    """PPO's clipped surrogate with the same value, and a bounded gradient above the upper clip bound.

    Per token, with r = exp(lp - lp_old) and sg(x) the value of x without gradient:

        upper = (1 + clip_high) r / sg(r)                       # value 1 + clip_high, gradient (1 + clip_high) grad lp
        x     = max(-A r, -A clip(r, 1 - clip_low, upper))
        loss  = min(x, -dual_clip A) where A < 0,  else x

    The value is always PPO's with a dual clip. The gradient is PPO's, too, except for tokens with A > 0 and r > 1 +
    clip_high: PPO drops them; here they have the gradient -A (1 + clip_high) grad lp however large r is, as in CISPO.
    Most of them are uncertain tokens that one update made much more likely. On-policy (r = 1) it is PPO. Aggregation
    and KL loss are the host's. Entropy plays no role in it.

    Symbols: lp, lp_old, A, loss (rows, time); the gradient flows through lp only.

    Special cases: masked tokens have loss and gradient 0 for any value.

    Source: arXiv 2510.14545, entropy clipping-balanced mechanism; `compute_policy_loss_entropy_balanced_clipping` in
    `AEPO/verl_aepo_entropy/verl/trainer/ppo/core_algos.py` of the authors' code.
    """

    name = "aepo_clip"
    fidelity = "code"
    does = "Keeps the gradient of tokens that one update made more likely than the clip range allows"
    problems = ("stale", "exploration")
    needs = frozenset({"several_updates"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        clip_low: float = param(0.2, "lower clip range: the ratio is clipped at 1 - clip_low", ge=0, lt=1)
        clip_high: float = param(0.2, "upper clip range: the ratio is clipped at 1 + clip_high", ge=0)
        dual_clip: float = param(3.0, "c of the dual clip, which bounds the loss of a token with A < 0 by -c A", gt=1)

    def policy_loss(self, terms: Terms) -> Tensor:
        p, live = self.params, Live(terms)
        lp, old, adv = live.all("logprobs", "old_logprobs", "advantages")
        log_ratio = (lp - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        ratio = torch.exp(log_ratio)
        upper = (1 + p.clip_high) * torch.exp(log_ratio - log_ratio.detach())
        plain = -adv * ratio
        clipped = -adv * torch.minimum(ratio, upper).clamp(min=1 - p.clip_low)
        loss = torch.maximum(plain, clipped)
        live.log_means(
            self,
            clipfrac=clipped > plain,
            clipfrac_lower=(adv < 0) & (loss > -p.dual_clip * adv),
            preserved=(adv > 0) & (ratio > 1 + p.clip_high),
        )
        return torch.where(adv < 0, torch.minimum(loss, -p.dual_clip * adv), loss)
