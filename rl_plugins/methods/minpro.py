"""MinPRO (arXiv 2601.22718): multiplies a token's importance ratio by the smallest ratio before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Terms, param
from rl_plugins.core.losses import LOG_RATIO_LIMIT, Live, weighted_logprob


class Minpro(Method):
    """Minimum Prefix Ratio policy optimization: damps each token by the smallest importance ratio of its prefix.

    Reconstruction: we found no official code and no clip values (last look 2026-11-26). The value for a token without a
    prefix is that of two third-party implementations.

    Per token t of a row (nothing crosses rows):

        rho_t  = exp(clamp(lp_t - lp^rollout_t, -log_ratio_limit, log_ratio_limit))
        M_t    = min{ rho_i : i < t, token i trained },  1 if no such token       # not capped: it may exceed 1
        w_t    = stop_gradient(clip(M_t rho_t, 1 - clip_low, 1 + clip_high))
        loss_t = -w_t A_t lp_t,   so   d loss / d lp_t = -w_t A_t / N             # N as the host normalizes

    It is CISPO with log M subtracted from the rollout log-probs; on-policy (all ratios 1) it is REINFORCE.

    Symbols: lp (rows, time) log-probs in nats, with gradient, in the model's dtype; lp^rollout those of the
    distribution the engine sampled from; A (rows, time) advantages, here any estimator's (the paper's is GRPO's, one
    per row). Ratios, minimum and weight are float32 or better. Aggregation is the host's; there is no KL term.

    Special cases: tokens that are not trained (tool output, padding, tokens another method took out) are skipped by the
    minimum and have loss and gradient 0 for any log-probs. A token without a known rollout log-prob uses its old
    log-prob.

    Source: arXiv 2601.22718, the MinPRO objective; the loss is verl's `compute_policy_loss_cispo` on M rho.
    """

    name = "minpro"
    fidelity = "reconstruction"
    does = "Damps each token by the smallest importance ratio before it"
    problems = ("stale",)
    needs = frozenset({"rollout_logprobs", "off_policy"})
    host_options = {"trl": {"vllm_importance_sampling_correction": False}}
    corrects_sampling = True

    @dataclass(frozen=True)
    class Params(MethodParams):
        clip_low: float = param(1.0, "lower clip range of the weight; 1: no lower bound (ours)", ge=0, le=1)
        clip_high: float = param(4.0, "upper clip range of the weight (ours)", ge=0, allow_inf=True)
        # two such log-ratios are added before exp: 80 still fits into float32
        log_ratio_limit: float = param(LOG_RATIO_LIMIT, "limit of |log-ratio|, in nats", gt=0, le=40)

    def policy_loss(self, terms: Terms) -> Tensor:
        p, live = self.params, Live(terms)
        lp, behavior, advantages = live.all("logprobs", "rollout_logprobs", "advantages")
        log_ratio = (lp.detach() - behavior).clamp(-p.log_ratio_limit, p.log_ratio_limit)
        log_prefix = log_prefix_min(log_ratio, live.valid)
        product = torch.exp(log_prefix + log_ratio)
        weight = product.clamp(1 - p.clip_low, 1 + p.clip_high)
        live.log_means(self, weight_mean=weight, clipped=weight != product, prefix_min=torch.exp(log_prefix))
        live.log_extreme(self, "weight_min", weight, "min")
        return weighted_logprob(lp, weight, advantages)


def log_prefix_min(log_ratio: Tensor, valid: Tensor) -> Tensor:
    """(rows, time) log of the smallest ratio over the valid tokens strictly before each token; 0 where there is none.

    Args:
        log_ratio: (rows, time), finite where `valid`.
        valid: (rows, time) bool.
    """
    inclusive = torch.cummin(torch.where(valid, log_ratio, torch.inf), dim=1).values
    before = torch.nn.functional.pad(inclusive[:, :-1], (1, 0), value=torch.inf)
    return torch.where(torch.isinf(before), 0.0, before)
