"""AReaL's decoupled PPO loss (arXiv 2505.24298): the trust region is centered on a recent policy."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import ConfigError, Method, MethodParams, Terms, from_params, param, ppo_clip, signals
from rl_plugins.core.losses import LOG_RATIO_LIMIT, Live, finite

Metric = Literal["ratio", "k1", "k2", "k3", "k3_code"]
Level = Literal["token", "sequence"]
Action = Literal["none", "mask", "clamp"]
Proximal = Literal["recompute", "loglinear", "linear", "rollout"]

WEIGHTED = ("recompute", "loglinear", "linear")  # proximal policies that differ from the behaviour policy
BOUNDED = ("mask", "clamp")
_BOUND = {"action": BOUNDED, "proximal": WEIGHTED}
_ROW = {**_BOUND, "level": "sequence"}
EPS = 1e-10  # added to the probability of `linear` before the logarithm, as in the authors' code


class DecoupledPpo(Method):
    """PPO around a recent proximal policy p, weighted for the older behaviour policy b that sampled. Per token:

        u      = exp(lp - lp^p)
        ppo    = max(-A u, -A clip(u, 1 - clip_low, 1 + clip_high)),   at most dual_clip |A| if that is given
        omega  = stop_gradient(exp(lp^p - lp^b)),   bounded as `action` says
        loss   = omega ppo,   averaged over all tokens that are trained, rejected ones included

    `action: mask` rejects: tokens whose metric m lies outside of [lower, upper] have loss 0. `clamp` limits omega to
    [lower or 0, upper]. `none` leaves it; the loss is then that of DOTS's replay (arXiv 2506.05316). The `metric` m is
    of r' = exp(lp^p - lp^b): `ratio` r'; `k1` log r'; `k2` (log r')^2 / 2; `k3` r' - log r' - 1; `k3_code` 1/r' + log
    r' - 1. With `level: sequence` the tokens of a row share one m, the `aggregation` of their values. For the ratio it
    is taken in log space, and omega is then the geometric mean of the row.

    p has the weights v^p = `current_version`: in TRL those at the start of the generation batch, in verl the last
    published ones. With v = v^p + 1 and alpha = clip((v^p - v^b) / (v - v^b), 0, 1) per token, `proximal` is

        recompute   old log-probs, made by a pass
        loglinear   lp^p = lp^b + alpha (stop_gradient(lp) - lp^b)
        linear      lp^p = log((1 - alpha) exp(lp^b) + alpha exp(stop_gradient(lp)) + 1e-10)
        rollout     lp^p = lp^b, so omega = 1: PPO around the policy that sampled

    Symbols: lp, lp^p, lp^b log-probs in nats, A advantages, loss, all (rows, time). Ratios and weights are float32 or
    better, differences of log-probs are limited to 20 nats before `exp`. Versions are published weights; alpha is 0 for
    a token whose version is negative or not older than v^p.

    Special cases: a log-ratio that is not finite counts as 0, so omega is 1; if it is that of lp and lp^p, the token
    has no gradient. Tokens that are not trained have loss and gradient 0 for any value and count in no statistic.

    Raises:
        ConfigError: bounds that leave nothing, or `clamp` of another metric than the ratio.

    Source: arXiv 2505.24298, section 5.2; `ppo_actor_loss_fn`, `apply_rejection_sampling` (areal/utils/functional) and
    `compute_prox_logp_approximations` (areal/trainer/ppo/actor.py) of the authors' code; `compute_policy_loss_temp` of
    DOTS.
    """

    name = "decoupled_ppo"
    fidelity = "code"
    does = "Clips around a recent policy and weights each token for the older policy that sampled it"
    problems = ("stale",)
    host_options = {"trl": {"vllm_importance_sampling_correction": False}}
    corrects_sampling = True
    needs = from_params(
        lambda p: signals("rollout_logprobs", "off_policy", token_versions=p.proximal in ("loglinear", "linear"))
    )
    old_policy = from_params(lambda p: "proximal" if p.proximal == "recompute" else "host")

    @dataclass(frozen=True)
    class Params(MethodParams):
        clip_low: float = param(0.2, "lower clip range: u is clipped at 1 - clip_low", ge=0, le=1)
        clip_high: float = param(0.2, "upper clip range: u is clipped at 1 + clip_high", ge=0, allow_inf=True)
        dual_clip: float | None = param(None, "c, bound -c A of the loss where A < 0", gt=1)
        proximal: Proximal = param("recompute", "policy at the centre of the trust region")
        level: Level = param("token", "unit that weights and bounds are of", only_if={"proximal": WEIGHTED})
        action: Action = param("mask", "treatment of tokens outside the bounds", only_if={"proximal": WEIGHTED})
        metric: Metric = param("ratio", "quantity that is bounded", only_if={"action": "mask", "proximal": WEIGHTED})
        aggregation: Literal["mean", "sum", "max"] = param("mean", "statistic of a row's metric", only_if=_ROW)
        upper: float = param(5.0, "upper bound of the metric", gt=0, allow_inf=True, only_if=_BOUND)
        lower: float | None = param(None, "lower bound of the metric; none: no bound", only_if=_BOUND)

        def check(self) -> None:
            if self.metric == "ratio" and self.action in BOUNDED and self.upper <= 1:
                raise ConfigError(
                    f"parameter `upper` is {self.upper:g}; it must be > 1, because tokens of unchanged probability "
                    f"have the ratio 1."
                )
            if self.lower is not None and self.lower > self.upper:
                raise ConfigError(
                    f"parameter `lower` is {self.lower:g} and `upper` is {self.upper:g}; no value is between them. "
                    f"Lower `lower`."
                )
            if self.lower is not None and self.lower < 0 and self.metric != "k1":
                raise ConfigError(
                    f"parameter `lower` is {self.lower:g}, and the metric `{self.metric}` is never negative. Give a "
                    f"positive value, or none."
                )

    def policy_loss(self, terms: Terms) -> Tensor:
        p, live = self.params, Live(terms)
        lp, proximal, behavior, adv = live.all("logprobs", "old_logprobs", "rollout_logprobs", "advantages")
        if p.proximal != "recompute":
            proximal = approximated(p.proximal, lp.detach(), behavior, terms.versions, terms.current_version)
        change, log_ratio = finite(lp - proximal), finite(proximal - behavior)
        omega, outside = self._weight(log_ratio, live.valid)
        loss = ppo_clip(change, torch.zeros_like(change), adv, p.clip_low, p.clip_high, p.dual_clip)
        ratio = torch.exp(change.detach().clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
        plain, clipped = -adv * ratio, -adv * ratio.clamp(1 - p.clip_low, 1 + p.clip_high)
        live.log_means(
            self, weight_mean=omega, filtered=outside, clipfrac=(clipped > plain) & (omega > 0), behavior_kl=-log_ratio
        )
        if p.dual_clip is not None:
            bounded = (adv < 0) & (torch.maximum(plain, clipped) > -p.dual_clip * adv)
            live.log_means(self, clipfrac_dual=(omega > 0) & bounded)
        live.log_extreme(self, "weight_max", omega, "max")
        return omega.detach() * loss

    def _weight(self, log_ratio: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
        """omega after the action, and where the metric is outside of the bounds, both (rows, time)."""
        p = self.params
        in_logs = p.metric == "ratio"  # of a row, a ratio is the geometric mean, the product or the largest
        metric = log_ratio if in_logs else measured(log_ratio, p.metric)
        if p.level == "sequence":
            log_ratio = _of_rows(log_ratio, valid, "mean").expand_as(metric) if in_logs else log_ratio
            metric = _of_rows(metric, valid, p.aggregation).expand_as(metric)
        metric = measured(metric, "ratio") if in_logs else metric
        omega = measured(log_ratio, "ratio")
        lower = -math.inf if p.lower is None else p.lower
        outside = ((metric > p.upper) | (metric < lower)) & (p.action != "none")
        if p.action == "mask":
            return torch.where(outside, 0.0, omega), outside
        return torch.where(outside, omega.clamp(max(lower, 0.0), p.upper), omega), outside


def measured(log_ratio: Tensor, metric: Metric) -> Tensor:
    """The metric of every token, from the log of its ratio."""
    if metric == "k1":
        return log_ratio
    if metric == "k2":
        return log_ratio**2 / 2
    limited = log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    if metric == "ratio":
        return torch.exp(limited)
    limited = limited if metric == "k3" else -limited
    return torch.exp(limited) - limited - 1


def approximated(
    how: Proximal, logprobs: Tensor, behavior: Tensor, versions: Tensor | None, current_version: int
) -> Tensor:
    """(rows, time) log-probs of the proximal policy without a pass of its own.

    Args:
        logprobs: of the live policy, without gradient.
        behavior: of the policy that sampled.
        versions: published weights that made each token.
        current_version: newest published weights at the start of the optimizer step: those of the proximal policy.
    """
    if how == "rollout":
        return behavior
    assert versions is not None  # in `needs`
    gap = (current_version - versions).to(behavior.dtype).clamp(min=0)
    alpha = torch.where(versions < 0, 0.0, gap / (gap + 1))
    if how == "loglinear":
        return behavior + alpha * (logprobs - behavior)
    return torch.log((1 - alpha) * torch.exp(behavior) + alpha * torch.exp(logprobs) + EPS)


def _of_rows(x: Tensor, valid: Tensor, aggregation: str) -> Tensor:
    """(rows, 1) of the valid tokens of each row; 0 of a row without one."""
    if aggregation == "max":
        largest = torch.where(valid, x, -torch.inf).amax(1, keepdim=True)
        return torch.where(valid.any(1, keepdim=True), largest, 0.0)
    total = torch.where(valid, x, 0.0).sum(1, keepdim=True)
    return total / valid.sum(1, keepdim=True).clamp(min=1) if aggregation == "mean" else total
