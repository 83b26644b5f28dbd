"""V_0.5 (arXiv 2603.10848): fuses a value prior with few rollouts, and samples more only where they disagree."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from rl_plugins import ConfigError, Groups, Idle, Method, MethodParams, Plan, Rollouts, Run, Tokens, param
from rl_plugins.core.params import below
from rl_plugins.core.rollouts import MAX_ROUNDS, PerRollout
from rl_plugins.kit.priors import PriorParams, make_prior

_EPS = 1e-4  # added to what advantages are divided by
Scope = Literal["none", "group", "batch"]
_MORE = {"cost": (None, below(math.inf))}
Prior = Literal["running_mean", "nearest", "constant", "column"] | Callable[..., Any]


class V05(Method):
    """Combines group mean and value prior into a baseline, weighted by how far the rollouts contradict the prior.

    For a group with k rollouts of mean reward m, and a prior V of the prompt on the same scale:

        s2 = ((reward_high - reward_low) / 2)^2          no reward in these bounds has a larger variance
        D2 = max(0, (m - V)^2 - s2 / k)                  squared bias of the prior; 0: it is believed
        w  = D2 / (D2 + s2 / k)                          weight of the data, least mean squared error
        b  = w m + (1 - w) V,      A_i = r_i - b

    k starts at `k_init`. After each round of generation, for every prompt with k < k_max

        gain = D2^2 s2 / ((k D2 + s2) ((k + 1) D2 + s2))     fall of the error w^2 s2/k + (1-w)^2 D2 with one more

    and if gain > cost, `increment` more rollouts are made (D2 is then estimated again). cost = s2 / k_max^2 by default.
    The batch holds group size x prompts rows, and extra rollouts go to the largest gains first.

    Symbols: rewards, advantages (rows,) float64; k, m, V, D2, w, b one per group. V comes from `prior` and is clipped
    to the reward bounds. A rollout of several rows counts once, with the mean reward of its rows. `leave_one_out` takes
    m, k of the other rollouts.

    Special cases: rollouts without a reward (NaN) are not in k or m; a group without any reward asks for no more. Where
    the prior has no value (NaN: before the first rewards) b = m.

    State: that of the prior. Draws only choose the context's sample of a large batch.

    Raises:
        ConfigError: more rounds than a batch may have, k_init > group size.
        MethodError: the prior fails (see `rl_plugins.kit.services`).

    Source: arXiv 2603.10848, without code, as read through independent notes (2026-11-26), which print the fusion, the
    test and the cost; the gain is algebra from the paper's model.
    """

    name = "v0_5"
    fidelity = "paper"
    does = "Fuses a value prior with few rollouts and samples more only where they disagree"
    problems = ("few_rollouts", "no_signal")
    rounds = True
    idle = (Idle({"unknown": 1}, "the prior has no value for any prompt: the baseline is the mean. Look at `prior`."),)
    decides_rollouts = True

    @dataclass(frozen=True)
    class Params(PriorParams):
        prior: Prior = param("running_mean", "source of V: one of these, or a function values(prompts, context)")
        prior_value: float | None = param(None, "V of every prompt; required", only_if={"prior": "constant"})
        k_init: int = param(4, "first rollouts of every prompt (paper: 1 and 2 do not converge)", ge=1)
        k_max: int = param(16, "largest number of rollouts of a prompt", ge=1, only_if=_MORE)
        increment: int = param(1, "rollouts added per round", ge=1, only_if=_MORE)
        cost: float | None = param(None, "gain above which one more is made; inf: never", ge=0, allow_inf=True)
        reward_low: float = param(0.0, "lowest possible reward")
        reward_high: float = param(1.0, "highest possible reward")
        leave_one_out: bool = param(False, "exclusion of the rollout itself from mean and k (ours)")
        advantage_norm: Scope = param("none", "scope of the root mean square of A")

        def check(self) -> None:
            super().check()
            if self.reward_low >= self.reward_high:
                raise ConfigError(
                    f"`reward_low` is {self.reward_low:g} and `reward_high` {self.reward_high:g}; the first must be "
                    f"lower. They are the bounds of the rewards."
                )
            if self.cost == math.inf:  # no further rollouts
                return
            if self.k_max < self.k_init:
                raise ConfigError(f"`k_max` is {self.k_max}, below `k_init` = {self.k_init}; it must be at least that.")
            if -(-(self.k_max - self.k_init) // self.increment) >= MAX_ROUNDS:
                raise ConfigError(
                    f"From {self.k_init} to {self.k_max} rollouts by {self.increment} takes {MAX_ROUNDS} or more "
                    f"rounds of generation after the first. Raise `increment`."
                )

        @property
        def s2(self) -> float:
            return ((self.reward_high - self.reward_low) / 2) ** 2

    def __init__(self, params: MethodParams | None = None) -> None:
        super().__init__(params)
        self.prior = make_prior(self.params, -torch.inf, torch.inf)
        self.needs = self.prior.needs

    def check(self, run: Run) -> None:
        p = self.params
        if run.group_size < p.k_init:
            raise ConfigError(
                f"the batch has room for {run.group_size} rollouts per prompt, and `k_init` is {p.k_init}. Raise the "
                f"group size (to between k_init and k_max: what is above k_init is room for extra rollouts)."
            )

    def start(self, run: Run) -> None:
        p = self.params
        if run.group_size == p.k_init < p.k_max:
            self.warn(
                f"the group size is k_init = {p.k_init}, so there is no room for extra rollouts; only the baseline is "
                f"changed. A group size of up to k_max = {p.k_max} makes room."
            )
        self.state = self.prior.start(run)

    def plan(self, plan: Plan) -> Plan:
        """k_init rollouts each; in later rounds more for those whose error would fall by more than they cost."""
        p = self.params
        if plan.round == 0:
            rows = tuple(row.replace(n=min(row.n, max(p.k_init, len(row.given) - row.spare))) for row in plan.rows)
            return plan.replace(rows=rows)
        groups, left, rows = plan.so_far, plan.budget - plan.trained, plan.rows
        made = [len(g.rewards) for g in groups]
        of_group = Groups(torch.arange(len(groups)).repeat_interleave(torch.tensor(made)), count=len(groups))
        reward = torch.cat([g.rewards for g in groups]).double()
        self._check_bounds(reward[~torch.isnan(reward)])
        k, mean = of_group.n(reward), of_group.mean(reward)
        prior = self._predict(torch.tensor([g.row.prompt_index for g in groups]))
        gain = next_gain(fuse(mean, k, prior, p.s2).bias2, k, p.s2)
        cost = p.s2 / p.k_max**2 if p.cost is None else p.cost
        text = "prior {prior:.2f}, mean {mean:.2f} of {n:.0f}; a rollout more gains {gain:.2g} at a cost of {cost:.2g}"
        named = [g.row.group for g in groups]
        self.note(named, text, prior=prior, mean=mean, n=k, gain=gain, cost=cost)
        by_gain = torch.sort(gain, descending=True, stable=True).indices
        more = []
        for i in by_gain[gain[by_gain] > cost].tolist():
            n = min(p.increment, p.k_max - made[i], left)
            if n > 0:
                more.append(groups[i].row.replace(n=n, spare=0, given=()))
                left -= n
        return plan.replace(rows=(*rows, *more))

    def further_rounds(self, plan: Plan) -> tuple[int, int]:
        p = self.params
        most = [0 if p.cost == math.inf else max(0, p.k_max - row.n) for row in plan.rows]
        return min(-(-max(most) // p.increment), plan.budget), min(sum(most), plan.budget)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        p, each = self.params, rollouts.per_rollout
        groups, reward = each.groups, each.reward
        self._check_bounds(reward[~torch.isnan(reward)])
        prior = groups.mean(self._predict(each.prompt_index))  # a group has one prompt, unless a method merged some
        if p.leave_one_out:
            mean, k = groups.leave_one_out(reward), groups.rows(groups.n(reward)) - 1
            baseline = fuse(mean, k, groups.rows(prior), p.s2).baseline
        else:
            baseline = groups.rows(fuse(groups.mean(reward), groups.n(reward), prior, p.s2).baseline)
        self._report(each, groups, prior)
        advantages = rollouts.reward - each.rows.rows(baseline)
        if p.advantage_norm != "none":
            same = rollouts.groups if p.advantage_norm == "group" else Groups(torch.zeros_like(rollouts.group))
            advantages = advantages / (same.rows(same.mean(advantages**2)).sqrt() + _EPS)
        return torch.nan_to_num(advantages, nan=0.0)

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        each = rollouts.per_rollout
        known = ~torch.isnan(each.reward)
        self.state = self.prior.observe(self.state, each.prompt_index[known], each.reward[known], self.rng("context"))

    def _predict(self, prompts: Tensor) -> Tensor:
        """V of each prompt, asked once per prompt, inside the reward bounds."""
        ids, place = torch.unique(prompts, return_inverse=True)
        return self.prior.predict(self.state, ids).clamp(self.params.reward_low, self.params.reward_high)[place]

    def _check_bounds(self, reward: Tensor) -> None:
        p = self.params
        if len(reward) and not (p.reward_low <= float(reward.min()) and float(reward.max()) <= p.reward_high):
            self.warn(
                f"rewards go from {float(reward.min()):g} to {float(reward.max()):g}, outside the bounds "
                f"{p.reward_low:g} to {p.reward_high:g}, which set the noise of a rollout. Set `reward_low` and "
                f"`reward_high` to those of your rewards."
            )

    def _report(self, each: PerRollout, groups: Groups, prior: Tensor) -> None:
        mean, k = groups.mean(each.reward), groups.n(each.reward)
        known = ~torch.isnan(prior) & (k > 0)
        weight = fuse(mean, k, prior, self.params.s2).weight[known]
        self.log("believed", (weight == 0).double().mean())
        self.log("data_weight", weight.mean())
        self.log("rollouts", k.mean())
        self.log("prior_error", (mean - prior)[known].abs().mean())
        self.log("unknown", torch.isnan(prior).double().mean())
        if bool((torch.isnan(prior) & (k == 1)).any()):
            self.warn("a group has a single rollout and its prompt no prior, so its advantage is 0.")


@dataclass(frozen=True)
class Fusion:
    """Per group: squared bias of the prior, weight of the data, and the baseline."""

    bias2: Tensor
    weight: Tensor
    baseline: Tensor


def fuse(mean: Tensor, k: Tensor, prior: Tensor, s2: float) -> Fusion:
    """Mean of k rewards and a prior with the weight of least squared error.

    k = 0: the prior alone. A prior of NaN: the mean alone, with a bias of 0, for there is nothing to test.
    """
    noise = s2 / k.clamp(min=1)
    bias2 = torch.where(k > 0, ((mean - prior) ** 2 - noise).clamp(min=0), 0.0).nan_to_num(nan=0.0)
    weight = torch.where(torch.isnan(prior), 1.0, bias2 / (bias2 + noise))
    shift = torch.where(weight > 0, weight * (mean - prior), 0.0)  # exactly the prior where that is believed
    return Fusion(bias2, weight, torch.where(torch.isnan(prior), mean, prior + shift))


def next_gain(bias2: Tensor, k: Tensor, s2: float) -> Tensor:
    """By how much one more rollout lowers the least error D2 s2 / (k D2 + s2), at the same D2."""
    return bias2**2 * s2 / ((k * bias2 + s2) * ((k + 1) * bias2 + s2))
