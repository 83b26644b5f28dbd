"""Truncated importance sampling of DART (arXiv 2509.23866)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from rl_plugins import Method, MethodParams, Rollouts, Shape, Tokens, param
from rl_plugins.core.losses import LOG_RATIO_LIMIT


class DartTis(Method):
    """Weights every token by the truncated ratio of the trainer's to the engine's probability.

        w = min(exp(lp_old - lp_engine), C),   without gradient;   A' = w A

    w multiplies the clipped token loss. It is not negative, so scaling the advantage of the token is the same, for a
    clip, a second clip for negative advantages and a ratio per row.

    Symbols: lp_old log-probs of the policy at the start of the step, lp_engine of the distribution that was sampled,
    both in nats. Differences are limited to 20 before `exp`.

    Special cases: a token whose sampled log-prob is not known has w = 1; in the authors' code that is a row whose
    log-probs are all 0. A difference that is not finite counts as 0.

    Source: arXiv 2509.23866, section on distribution alignment; compute_policy_loss with vllm_log_prob in
    verl/trainer/ppo/core_algos.py of dart-gui.
    """

    name = "dart_tis"
    fidelity = "code"
    does = "Weights tokens by the truncated ratio between the trainer's and the engine's probability"
    problems = ("stale",)
    host_options = {"trl": {"vllm_importance_sampling_correction": False}}
    needs = frozenset({"tokens", "old_logprobs", "rollout_logprobs", "off_policy"})
    corrects_sampling = True
    old_policy = "proximal"

    @dataclass(frozen=True)
    class Params(MethodParams):
        cap: float = param(1.0, "C, upper bound of the weight; inf: none", gt=0, allow_inf=True)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        assert tokens.old_logprobs is not None and tokens.rollout_logprobs is not None  # in `needs`
        change = tokens.old_logprobs.double() - tokens.rollout_logprobs.double()
        known = torch.isfinite(change) & ~tokens.forced
        ratio = torch.where(known, change, 0.0).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        weight = ratio.clamp(max=self.params.cap) if not math.isinf(self.params.cap) else ratio
        weight = torch.where(known, weight, 1.0)
        if bool(tokens.keep.any()):
            self.log("weight_mean", weight[tokens.keep].mean())
            self.log("weight_max", weight[tokens.keep].max(), "max")
            self.log("capped", (known & (ratio > self.params.cap))[tokens.keep].double().mean())
        return Shape(advantages=weight * tokens.advantages)
