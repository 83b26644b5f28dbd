"""ECHO's clip range: wider for a rollout whose end the policy is unsure of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rl_plugins import ConfigError, Groups, Method, MethodParams, Rollouts, Shape, Terms, Tokens, param, ppo_clip
from rl_plugins.core.losses import LOG_RATIO_LIMIT, Live
from rl_plugins.core.params import above
from rl_plugins.methods.echo.confidence import confidence


class EchoClip(Method):
    """PPO's clipped surrogate with a clip range per row, which is wider where the policy is unsure of the row's end.

    For every row b, then for its tokens with ratio r = exp(lp - lp_old):

        Ctail_b = mean of C over the last tail_window tokens      # fewer if the row is shorter; 0 without a token
        eps_b   = eps_min + (eps_max - eps_min) sigmoid(kappa (1 - Ctail_b))
        loss    = max(-A r, -A clip(r, 1 - eps_b, 1 + eps_b)),    at most -dual_clip A where A < 0

    1 - Ctail lies in [0, 1], so the sigmoid lies in [1/2, sigmoid(kappa)] and the lower half of the range is never
    used: with the defaults eps is 0.125 (sure) to 0.197 (unsure). With eps_min = eps_max it is PPO's dual clip. The
    range has no gradient. Aggregation and KL loss are the host's.

    Symbols: lp, lp_old, A, loss (rows, time); C (tokens,) in [0, 1], the probability of the token before the update,
    eps and Ctail (rows,) float64.

    Special cases: only trained tokens are part of the tail. Masked tokens have loss and gradient 0 for any value.

    Source: arXiv 2602.02150; `apply_hybrid_advantage_shaping` and `compute_policy_loss` in
    `verl/trainer/ppo/core_algos.py` of the authors' code."""

    name = "echo_clip"
    fidelity = "code"
    does = "Widens the clip range of rollouts whose end the policy is unsure of"
    problems = ("stale", "exploration")
    needs = frozenset({"tokens", "old_logprobs", "several_updates"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        tail_window: int = param(16, "number of last tokens that count; 0: all", ge=0, only_if={"kappa": above(0)})
        eps_min: float = param(0.05, "lower end of the sigmoid's range", ge=0, lt=1)
        eps_max: float = param(0.2, "upper end of the clip range", ge=0, lt=1)
        kappa: float = param(4.0, "steepness of the sigmoid", ge=0)
        dual_clip: float = param(3.0, "c of the dual clip, which bounds the loss of a token with A < 0 by -c A", gt=1)

        def check(self) -> None:
            if self.eps_min > self.eps_max:
                raise ConfigError(
                    f"`eps_min` is {self.eps_min:g} and `eps_max` is {self.eps_max:g}; the clip range lies between "
                    f"them, so lower `eps_min` or raise `eps_max`."
                )

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        p = self.params
        if p.tail_window:
            last = last_tokens(tokens, len(rollouts), p.tail_window)
            tail = Groups(tokens.row[last], count=len(rollouts)).mean(confidence(tokens, last))
        else:
            of_all = torch.where(tokens.keep, confidence(tokens), torch.nan)
            tail = Groups(tokens.row, count=len(rollouts)).mean(of_all)
        trained, tail = ~torch.isnan(tail), torch.nan_to_num(tail, nan=0.0).clamp(0, 1)
        clip_range = p.eps_min + (p.eps_max - p.eps_min) * torch.sigmoid(p.kappa * (1 - tail))
        if bool(trained.any()):
            self.log("tail_confidence", tail[trained].mean())
            self.log("clip_range", clip_range[trained].mean())
        return Shape(row_columns={"echo_clip_range": clip_range})

    def policy_loss(self, terms: Terms) -> Tensor:
        dual_clip, live = self.params.dual_clip, Live(terms)
        lp, old, adv = live.all("logprobs", "old_logprobs", "advantages")
        bound = terms.columns["echo_clip_range"].to(lp)
        ratio = torch.exp((lp.detach() - old).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        plain, clipped = -adv * ratio, -adv * torch.maximum(torch.minimum(ratio, 1 + bound), 1 - bound)
        lower = (adv < 0) & (torch.maximum(plain, clipped) > -dual_clip * adv)
        live.log_means(self, clipfrac=clipped > plain, clipfrac_lower=lower, kl=old - lp)
        return ppo_clip(lp, old, adv, bound, bound, dual_clip)


def last_tokens(tokens: Tokens, rows: int, most: int) -> Tensor:
    """(n,) int64, the last tokens of each row that are in the update, at most so many of a row."""
    inside = torch.from_numpy(np.flatnonzero(tokens.keep.numpy()))
    end = torch.searchsorted(tokens.row[inside], torch.arange(rows + 1))
    place = end[1:, None] - torch.arange(most, 0, -1)
    return inside[place[place >= end[:-1, None]]]
