"""MinPRO (arXiv 2601.22718): multiplies a token's importance ratio by the smallest ratio before it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Terms, param
from rl_plugins.core.losses import LOG_RATIO_LIMIT, weighted_logprob


class Minpro(Method):
    """Minimum Prefix Ratio policy optimization: damps each token by the smallest importance ratio of its prefix.

    Reconstruction: we found no official code and no clip values, and the value for a token without a prefix comes from
    a third-party implementation.

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
        p = self.params
        assert terms.rollout_logprobs is not None  # in `needs`
        valid = terms.mask > 0
        log_ratio = _log_ratio(terms.logprobs, terms.rollout_logprobs, p.log_ratio_limit)
        log_prefix = log_prefix_min(log_ratio, valid)
        product = torch.exp(log_prefix + log_ratio)
        weight = product.clamp(1 - p.clip_low, 1 + p.clip_high)
        self._log(weight, weight != product, torch.exp(log_prefix), valid)
        # selected on every factor: 0 * inf of a masked token would be NaN in the loss or in the gradient
        return weighted_logprob(_zero(terms.logprobs, valid), _zero(weight, valid), _zero(terms.advantages, valid))

    def _log(self, weight: Tensor, clipped: Tensor, prefix_min: Tensor, valid: Tensor) -> None:
        tokens = valid.sum()  # as weight, so that micro-batches of any size combine to the mean over all tokens
        for name, value in (("weight_mean", weight), ("clipped", clipped.to(weight)), ("prefix_min", prefix_min)):
            self.log(name, _zero(value, valid).sum() / tokens, weight=tokens)
        self.log("weight_min", torch.where(valid, weight, torch.inf).min(), reduce="min", weight=tokens)


def log_prefix_min(log_ratio: Tensor, valid: Tensor) -> Tensor:
    """(rows, time) log of the smallest ratio over the valid tokens strictly before each token; 0 where there is none.

    Args:
        log_ratio: (rows, time), finite where `valid`.
        valid: (rows, time) bool.
    """
    inclusive = torch.cummin(torch.where(valid, log_ratio, torch.inf), dim=1).values
    before = torch.nn.functional.pad(inclusive[:, :-1], (1, 0), value=torch.inf)
    return torch.where(torch.isinf(before), 0.0, before)


def _log_ratio(logprobs: Tensor, behavior: Tensor, limit: float) -> Tensor:
    dtype = torch.promote_types(logprobs.dtype, torch.float32)
    return (logprobs.detach().to(dtype) - behavior.to(dtype)).clamp(-limit, limit)


def _zero(x: Tensor, valid: Tensor) -> Tensor:
    return torch.where(valid, x, 0.0)
