"""DPPO (arXiv 2602.04879): a trust region on probabilities instead of ratios."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Terms, from_params, param, signals
from rl_plugins.core.losses import LOG_RATIO_LIMIT, Live, weighted_logprob


class Dppo(Method):
    """Divergence PPO: leaves out tokens whose probability has moved too far in the direction of their advantage.

    With p and mu the probabilities of a token under the policy that is trained and the one it is anchored to:

        rho    = p / mu
        D      = |p - mu|                                                  (`divergence: tv`)
                 mu log(mu / p) + (1 - mu) log((1 - mu) / (1 - p))         (`divergence: kl`), of token and not-token
        keep   = not (A > 0 and p > mu and D > bound_high  or  A <= 0 and p < mu and D > bound_low)
        loss   = - keep stop_gradient(min(rho, cap)) A log p

    A ratio clip drops rare tokens after a small change and keeps likely ones after a large one; here the change of
    probability counts. There is no KL term.

    Symbols: log p, log mu, A, loss (rows, time); the gradient flows through log p only. Aggregation is the host's.

    Special cases: masked tokens have loss and gradient 0. With `anchor: rollout` a token without a known rollout
    log-prob uses its old one. At p = mu the loss is REINFORCE's.

    Source: arXiv 2602.04879, binary approximations; `compute_policy_loss_dppo_tv` and `compute_policy_loss_dppo_kl` of
    verl, which the authors point to.
    """

    name = "dppo"
    fidelity = "code"
    does = "Bounds how far the probability of a token may move, where PPO bounds its ratio"
    problems = ("stale",)
    needs = from_params(
        lambda p: signals("off_policy", "rollout_logprobs") if p.anchor == "rollout" else signals("several_updates")
    )
    host_options = from_params(
        lambda p: {"trl": {"vllm_importance_sampling_correction": False}} if p.anchor == "rollout" else {}
    )
    corrects_sampling = from_params(lambda p: p.anchor == "rollout")

    @dataclass(frozen=True)
    class Params(MethodParams):
        divergence: Literal["tv", "kl"] = param("tv", "D, total variation or Kullback-Leibler divergence")
        bound_low: float = param(
            0.15, "largest divergence of tokens with A <= 0 (verl: 0.15 for tv, 0.05 for kl)", ge=0
        )
        bound_high: float = param(
            0.15, "largest divergence of tokens with A > 0 (verl: 0.15 for tv, 0.05 for kl)", ge=0
        )
        cap: float = param(20.0, "upper bound of the importance ratio", ge=1, allow_inf=True)
        anchor: Literal["rollout", "old"] = param("rollout", "mu, policy that sampled, or at the start of the step")

    def policy_loss(self, terms: Terms) -> Tensor:
        p, live = self.params, Live(terms)
        anchor = "rollout_logprobs" if p.anchor == "rollout" else "old_logprobs"
        lp, anchored, advantages = live.all("logprobs", anchor, "advantages")
        now = lp.detach()
        prob, before = torch.exp(now), torch.exp(anchored)
        divergence = (prob - before).abs()
        if p.divergence == "kl":
            others = (1 - before) * torch.log((1 - before + 1e-8) / (1 - prob + 1e-8))
            divergence = before * (anchored - now) + others
        away = torch.where(
            advantages > 0, (prob > before) & (divergence > p.bound_high), (prob < before) & (divergence > p.bound_low)
        )
        ratio = torch.exp((now - anchored).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        live.log_means(self, left_out=away, capped=ratio > p.cap, divergence=divergence)
        return weighted_logprob(lp, torch.where(away, 0.0, ratio.clamp(max=p.cap)), advantages)
