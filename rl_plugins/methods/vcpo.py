"""VCPO (arXiv 2602.17616): off-policy REINFORCE with learning rate and baseline set by the importance weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import (
    ConfigError,
    Groups,
    Method,
    MethodParams,
    Rollouts,
    Rows,
    Shape,
    Terms,
    Tokens,
    Update,
    from_params,
    param,
    signals,
)
from rl_plugins.core.groups import places
from rl_plugins.core.losses import Live, finite, widest

Baseline = Literal["opob", "group", "none"]
Norm = Literal["length", "proxy", "exact"]
Power = Literal["paper", "code", "none"]
Aggregate = Literal["mean", "median", "winsorized"]
LOWER, UPPER = 0.05, 0.95  # quantiles of `winsorized`
POWERS = {"none": (0.0, 0.0), "paper": (2.0, 0.0), "code": (2.0, 2.0)}  # of the weight and of the truncated one
OPOB = {"baseline": "opob"}
_SCALED = {"lr_scale": ("sqrt", "linear")}


class Vcpo(Method):
    """Variance Controlled off-Policy Optimization: makes an update smaller where few stale rows dominate it.

    Reconstruction in one part: the baseline needs the norm of every row's gradient, which takes a backward pass per
    row. No host makes that pass, so `gradnorm` replaces the norm. The rest is `code`: equal to the authors' code, which
    was run, to 8e-8. For each of the B rows i of an optimizer step, and for its prompt group G:

        w_i     = exp(sum_t (lp_t - lp^rollout_t)),   wbar_i = min(w_i, truncation)
        A_i     = (R_i - b_G) / s_G,    s_G = population deviation of the rewards of the group (1 if it is <= 1e-8)
        loss    = -(1/B) sum_i stop_gradient(A_i wbar_i) (1/L_i) sum_t (1 + lp_t - stop_gradient(lp_t))
        ess     = (sum_i w_i)^2 / sum_i w_i^2
        lr      <- lr min(1, (ess / B) / base_ess_ratio)^p        p = 1/2 (`sqrt`), 1 (`linear`); this step only

    The `baseline` b_G of the group is

        opob    sum_i W_i R_i / sum_i W_i,   W_i = w_i^2 n_i^2      (variance is least where n_i is the gradient's norm)
        group   the mean,   none  0

    with n_i^2 = L_i (`gradnorm: length`: equal and orthogonal tokens) or sum_t (1 - 2 p_t + sum_v p_v^2) (`proxy`).
    `normalize_by_length` divides n_i^2 by L_i^2. `weight_power` has w_i^2 as in the paper, w_i^2 wbar_i^2 as in the
    authors' code, or none. `aggregate` puts the W-weighted lower median, or the W-weighted mean of rewards limited to
    their W-weighted 5% and 95% quantiles, in place of the mean.

    Symbols: lp, lp^rollout log-probs in nats at the weights of the optimizer step and of the sampling policy; R_i final
    rewards; L_i tokens of row i that are trained. Sums, weights and statistics are float64. Weights are taken relative
    to the largest before `exp`, so nothing overflows.

    Special cases: rows without a token are not in B. An unscorable row (reward NaN) has A_i = 0, is in no statistic of
    its group, and counts in B and ess. Where all W of a group are 0, b_G is the mean of the group. A sum of log-ratios
    that is not finite counts as 0. A token whose live log-prob is not finite has no gradient.

    Raises:
        ConfigError: `gradnorm: exact`.

    Source: arXiv 2602.17616; `recipe/fully_async_policy/staleness_utils.py` and `verl/workers/actor/megatron_actor.py`
    of the authors' code.
    """

    name = "vcpo"
    fidelity = "reconstruction"
    does = "Scales the learning rate by effective sample size and uses a minimum-variance baseline"
    problems = ("stale",)
    host_options = {"trl": {"vllm_importance_sampling_correction": False}}
    aggregation = "sum"
    corrects_sampling = True
    needs = from_params(
        lambda p: signals(
            "rollout_logprobs",
            "current_logprobs",
            "off_policy",
            several_rollouts=p.baseline != "none",
            whole_groups=p.baseline == "opob",
            tokens=p.by_proxy,
            old_logprobs=p.by_proxy,
            sum_squared_probs=p.by_proxy,
        )
    )

    @dataclass(frozen=True)
    class Params(MethodParams):
        lr_scale: Literal["sqrt", "linear", "none"] = param("sqrt", "rule that scales the learning rate with ess / B")
        base_ess_ratio: float = param(1.0, "lowest ess / B with the host's learning rate", gt=0, le=1, only_if=_SCALED)
        truncation: float = param(8.0, "upper bound of the weight of a row in the loss", gt=0, allow_inf=True)
        baseline: Baseline = param("opob", "subtracted from rewards; opob: steps must hold whole groups")
        gradnorm: Norm = param("length", "estimate of n_i; exact is refused", only_if=OPOB)
        weight_power: Power = param("paper", "power of w_i in W_i: once, twice or none", only_if=OPOB)
        normalize_by_length: bool = param(False, "division of W by L^2", only_if=OPOB)
        aggregate: Aggregate = param("mean", "statistic that makes the baseline of a group", only_if=OPOB)
        norm_by_std: bool = param(True, "division of rewards by the population deviation of their group")

        @property
        def by_proxy(self) -> bool:
            return self.baseline == "opob" and self.gradnorm == "proxy"

        def check(self) -> None:
            if self.gradnorm == "exact":
                raise ConfigError(
                    "parameter `gradnorm` is 'exact', which needs the norm of the gradient of each row: a backward "
                    "pass per row, which neither host makes, and two more copies of the gradient. Use 'length' or "
                    "'proxy'."
                )

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """(rows,) with the mean in place of an optimal baseline, which is known at the weights of the update only."""
        return self._scaled(rollouts)

    def _scaled(self, rollouts: Rollouts) -> Tensor:
        p, groups = self.params, rollouts.groups
        centered, std = groups.center_and_std(rollouts.reward, ddof=0)
        if p.baseline == "none":
            centered = rollouts.reward
        if p.norm_by_std:
            centered = centered / groups.rows(torch.where(std > 1e-8, std, 1.0))
        return centered.nan_to_num(nan=0.0)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        """The reward of every row, centred in its group and scaled; where the norms are a proxy, their squares too."""
        columns = {"vcpo_reward": self._scaled(rollouts), "vcpo_scored": (~torch.isnan(rollouts.reward)).double()}
        if self.params.by_proxy:
            assert tokens.old_logprobs is not None and tokens.sum_squared_probs is not None  # in `needs`
            square = 1 - 2 * torch.exp(tokens.old_logprobs.double()) + tokens.sum_squared_probs.double()
            columns["vcpo_norm"] = Groups(tokens.row, count=len(rollouts)).sum(
                torch.where(tokens.keep, square.nan_to_num(nan=0.0), 0.0)
            )
        return Shape(row_columns=columns)

    def before_update(self, rows: Rows) -> Update:
        assert rows.logprobs is not None and rows.rollout_logprobs is not None  # in `needs`
        p, length = self.params, rows.length.double()
        if not len(length):
            return Update()
        log_w = finite(rows.logprobs.double() - rows.rollout_logprobs.double())
        bound = math.log(p.truncation)
        truncated = torch.exp(log_w.clamp(max=bound))
        ratio = ess_ratio(log_w)
        scale = lr_factor(ratio, p.base_ess_ratio, p.lr_scale)
        reward, shift = rows.columns["vcpo_reward"].double(), torch.zeros(())
        if p.baseline == "opob":
            scored = rows.columns["vcpo_scored"] > 0
            square = rows.columns["vcpo_norm"].double() if self.params.by_proxy else length
            square = square / length**2 if p.normalize_by_length else square
            log_weight = log_baseline_weight(log_w, square, p.weight_power, bound)
            groups = Groups(rows.group)
            baseline = groups.rows(weighted_baseline(groups, reward, log_weight, scored, p.aggregate))
            reward, shift = torch.where(scored, reward - baseline, 0.0), baseline.mean()
        values = {
            "ess_ratio": ratio,
            "ess_ratio_truncated": ess_ratio(log_w.clamp(max=bound)),
            "lr_scale": scale,
            "truncated": (log_w > bound).double().mean(),
            "weight_mean": truncated.mean(),
            "geometric_mean": torch.exp((log_w / length).clamp(max=LOG_LIMIT)).mean(),
        }
        if p.baseline == "opob":
            values["baseline_shift"] = shift
        for name, value in values.items():
            self.log(name, value)
        return Update(scale, {"vcpo_coefficient": reward * truncated / (len(length) * length)})

    def policy_loss(self, terms: Terms) -> Tensor:
        live = Live(terms)
        logprobs, behavior = live.all("logprobs", "rollout_logprobs")
        lp = finite(logprobs)
        log_ratio, length = finite(lp.detach() - behavior).to(widest(lp.device)), live.valid.sum(1)
        k3 = (torch.expm1(log_ratio.clamp(max=LOG_LIMIT)) - log_ratio).sum(1) / length.clamp(min=1)
        rows = (length > 0).sum()
        self.log("k3", k3.sum() / rows, weight=rows)
        return -live(terms.columns["vcpo_coefficient"]) * (1 + (lp - lp.detach()))


LOG_LIMIT = 100.0  # of what is logged: sums of its exp are finite


def ess_ratio(log_w: Tensor) -> float:
    """Effective sample size of weights exp(log_w), (rows,), over their number: from 1 / rows (one weight owns them all)
    to 1 (all are equal). A common factor changes nothing."""
    w = torch.exp(log_w - log_w.max())
    return min(1.0, float(w.sum() ** 2 / (w**2).sum() / len(w)))


def lr_factor(ratio: float, base: float, rule: str) -> float:
    """Factor on the learning rate, at most 1."""
    power = {"none": 0.0, "sqrt": 0.5, "linear": 1.0}[rule]
    return float(min(1.0, ratio / base) ** power)


def log_baseline_weight(log_w: Tensor, square: Tensor, power: str, bound: float) -> Tensor:
    """(rows,) log W.

    Args:
        log_w: (rows,) logs of the weights of the rows.
        square: (rows,) squares of the norms of their gradients.
        power: see `weight_power`.
        bound: log of the truncation.
    """
    once, again = POWERS[power]
    return once * log_w + again * log_w.clamp(max=bound) + torch.log(square.clamp(min=0))


def weighted_baseline(groups: Groups, reward: Tensor, log_weight: Tensor, scored: Tensor, how: Aggregate) -> Tensor:
    """(groups,) the baseline of every group; 0 where no weight is above 0.

    Args:
        reward: (rows,) finite.
        log_weight: (rows,) log W; -inf is a weight of 0.
        scored: (rows,) bool, rows that take part.
    """
    log_weight = torch.where(scored & ~torch.isnan(log_weight), log_weight, -torch.inf)
    largest = groups.rows(groups.max(log_weight))
    weight = torch.where(log_weight > -torch.inf, torch.exp(log_weight - largest), 0.0)
    total = groups.sum(weight)
    if how == "mean":
        found = groups.sum(weight * reward) / total
    else:
        value, share = _by_value(groups, reward, weight)
        if how == "median":
            found = _quantile(value, share, 0.5 * total)
        else:
            low, high = (groups.rows(_quantile(value, share, q * total)) for q in (LOWER, UPPER))
            found = groups.sum(weight * torch.minimum(torch.maximum(reward, low), high)) / total
    return torch.where(total > 0, found, 0.0)


def _by_value(groups: Groups, reward: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Rewards of each group in ascending order, (groups, largest size), padded with inf, and cumulative weights."""
    order = torch.sort(reward, stable=True).indices
    order = order[torch.sort(groups.index[order], stable=True).indices]
    at = groups.index[order], places(groups.size)
    shape = groups.count, int(groups.size.max())
    value, share = reward.new_full(shape, torch.inf), weight.new_zeros(shape)
    value[at], share[at] = reward[order], weight[order]
    return value, torch.cumsum(share, 1)


def _quantile(value: Tensor, share: Tensor, cut: Tensor) -> Tensor:
    """(groups,) the first reward, ascending, whose cumulative weight reaches `cut`; it has a weight above 0."""
    reached = (share >= cut[:, None]) & (share > 0)
    return value.gather(1, reached.double().argmax(1, keepdim=True))[:, 0]
