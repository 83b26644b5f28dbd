"""MC-GRPO (arXiv 2601.22582): the group's median as baseline, with one extra rollout to find it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Groups, Method, MethodParams, Plan, Rollouts, Shape, Tokens, param

_ZERO = 1e-6  # below this the authors' code takes an advantage for zero


class McGrpo(Method):
    """Centers rewards on the group's median, which one extreme reward cannot move, instead of its mean.

    For a prompt whose G rollouts are trained, n = G + 1 are generated. With `med` the lower median (the n/2-th smallest
    for even n, always one of the rewards) and rewards r_1 .. r_n of the group:

        m   = med(r)
        MAD = med(|r - m|)                    median absolute deviation, without the factor 1.4826
        A_i = (r_i - m) / (MAD + mad_eps)

    The pivot, the rollout that holds m, has A = 0 and leaves the update, so G rollouts are trained; the loss is the
    host's. Among several rollouts with reward m the pivot is the one that torch.median picks. All of them have A = 0,
    so the choice affects only terms that do not depend on the advantage (KL, entropy).

    Symbols: rewards and advantages are (rows,) float64. If a rollout is several rows that share its reward, the
    statistics are the same and all rows of the pivot leave.

    Special cases: rows without a reward (NaN) do not count in the statistics, have A = 0 and are the pivot only if no
    row of the group has a reward. A group of one rollout keeps it, with A = 0 and a warning. A group of equal rewards
    has A = 0 exactly and still loses its pivot. With two reward levels MAD is always 0, and rollouts off the median get
    +-1/mad_eps; the method warns.

    Source: arXiv 2601.22582, equations for the advantage and the pivot; `src/open_r1/grpo_trainer_math.py` and
    `grpo_trainer_gsm.py`, advantage block of `_generate_and_score_completions`, for `mad_eps`, ties and compensation.
    """

    name = "mc_grpo"
    fidelity = "code"
    hosts = ("trl", "verl", "diffusion")
    does = "Centers rewards on the group's median, with one extra rollout per prompt as its pivot"
    problems = ("few_rollouts",)
    keeps_batch_size = True  # the row that leaves is the one `plan` asked for in addition
    needs = frozenset({"several_rollouts"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        scale: Literal["mad", "none", "std"] = param(
            "mad", "divisor: MAD + mad_eps, none, or standard deviation + mad_eps"
        )
        mad_eps: float = param(1e-3, "constant added to the divisor", gt=0, only_if={"scale": ("mad", "std")})
        zero_compensation: bool = param(False, "non-zero advantages times group size / their number (GSM8K trainer)")
        advantage_clip: float | None = param(None, "limit of |advantage|; none: no limit (paper)", gt=0)

    def plan(self, plan: Plan) -> Plan:
        """One more rollout for every group, made to leave again."""
        rows, seen = [], set()
        for row in plan.rows:
            if (
                row.n + row.spare > 0 and row.group not in seen
            ):  # several plan rows may share a group, which has one pivot
                seen.add(row.group)
                row = row.replace(spare=row.spare + 1)
            rows.append(row)
        return plan.replace(rows=tuple(rows))

    def advantages(self, rollouts: Rollouts) -> Tensor:
        reward, groups, p = rollouts.reward, rollouts.groups, self.params
        mad = groups.mad(reward)
        advantages = reward - groups.rows(groups.median(reward))
        if p.scale != "none":
            spread = mad if p.scale == "mad" else groups.std(reward)
            advantages = advantages / (groups.rows(spread) + p.mad_eps)
        if p.zero_compensation:
            advantages = _compensate(advantages, groups)
        if p.advantage_clip is not None:
            advantages = advantages.clamp(-p.advantage_clip, p.advantage_clip)
        self._report(reward, groups, mad, advantages)
        return torch.where(torch.isnan(reward), 0.0, advantages)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        """The pivot of every group of two or more rollouts leaves."""
        groups, number = rollouts.groups, rollouts.rollout
        pivot = groups.median_row(rollouts.reward)
        any_row = groups.median_row(torch.zeros_like(rollouts.reward))
        pivot = torch.where(pivot < 0, any_row, pivot)  # no row of the group has a reward
        several = groups.min(number) < groups.max(number)
        leaves = groups.rows(several) & (number == groups.rows(number[pivot]))
        self.note(leaves, "the pivot: its reward {median:.3g} is the median of the group", median=rollouts.reward)
        return Shape(keep_rows=~leaves)

    def _report(self, reward: Tensor, groups: Groups, mad: Tensor, advantages: Tensor) -> None:
        scored = ~torch.isnan(reward)
        zero = (mad == 0)[~torch.isnan(mad)]
        centered = reward - groups.rows(groups.mean(reward))
        self.log("mad_zero", zero.double().mean())
        self.log("sign_changed", (centered * advantages < 0)[scored].double().mean())
        if bool(scored.any()):
            self.log("max_abs_advantage", advantages[scored].abs().max(), "max")
        unlimited = self.params.scale == "mad" and self.params.advantage_clip is None
        if unlimited and bool(((mad == 0) & (groups.max(reward) > groups.min(reward))).any()):
            self.warn(
                "in some groups half of the rollouts or more have the same reward, so the median absolute deviation is "
                f"0 and the others get advantages of distance / mad_eps (+-{1 / self.params.mad_eps:g} for rewards 0 "
                "and 1). Rewards of two levels always do that. Set the parameter `scale: none` or `advantage_clip: 3`; "
                "the metric mc_grpo/mad_zero is the share of groups with MAD = 0."
            )
        if bool((groups.size == 1).any()):
            self.warn("a group has a single row; there is nothing to compare it with, so its advantage is 0.")


def _compensate(advantages: Tensor, groups: Groups) -> Tensor:
    """Multiplies the non-zero advantages of a group by rows / number of them, so that zeros do not dilute the mean."""
    non_zero = advantages.abs() > _ZERO
    factor = groups.n(advantages) / groups.sum(non_zero.double()).clamp(min=1)
    return torch.where(non_zero, advantages * groups.rows(factor), advantages)
