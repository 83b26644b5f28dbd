"""SNR-aware filtering of RAGEN-2 (arXiv 2604.06268): trains the groups that hold most of the spread of rewards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Idle, Method, MethodParams, Rollouts, param


class VarianceFilter(Method):
    """Keeps the groups with the largest spread of rewards that together hold a share of all of it.

    With v_g the deviation of the rewards of group g (divisor n - 1), or its square, and the groups sorted by falling v:

        keep the shortest list of first groups with sum v >= share (sum of all v) - slack

    Groups without spread never stay: their gradient holds regularization only, which the paper blames for templates
    that no longer depend on the prompt.

    Symbols: rewards (rows,) float64 after `rewards` hooks.

    Special cases: of equal v the group with the lower number comes first. NaN rewards are left out; a group with fewer
    than two rewards has v = 0. If no group has spread, the whole batch leaves. Rows that left before count nowhere. A
    rollout of several rows counts once, with the mean of their rewards.

    Source: arXiv 2604.06268, SNR-aware filtering; `RolloutFilter._select_top_groups` (top_p, linear) in
    `ragen/trainer/rollout_filter.py` of the authors' code.
    """

    name = "variance_filter"
    fidelity = "code"
    does = "Trains the groups with the largest spread of rewards, up to a share of all of it"
    problems = ("no_signal", "agents")
    needs = frozenset({"several_rollouts"})
    idle = (Idle({"kept": 1.0}, "every group stays: their spreads are alike. Lower `share`."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        share: float = param(0.9, "share of the spread of all groups that those that stay hold", gt=0, le=1)
        spread: Literal["deviation", "variance"] = param("deviation", "v, spread of a group")
        slack: float = param(0.01, "spread by which the share may be missed", ge=0)

    def select(self, rollouts: Rollouts) -> Tensor:
        p, each = self.params, rollouts.per_rollout
        reward = each.rows.mean(torch.where(rollouts.kept, rollouts.reward, torch.nan))
        v = each.groups.std(reward).nan_to_num(nan=0.0)
        if p.spread == "variance":
            v = v * v
        falling, order = torch.sort(v, descending=True, stable=True)
        keep = torch.zeros(len(v), dtype=torch.bool)
        before = torch.cumsum(falling, 0) - falling
        keep[order] = (before < p.share * v.sum() - p.slack) & (falling > 0)
        self.log("kept", keep.double().mean())
        self.log("kept_spread", v[keep].sum() / v.sum().clamp(min=1e-30))
        if self.traced:
            text = f"the {p.spread} {{spread:.3g}} of the group's rewards is not among the largest"
            spread = each.rows.rows(each.groups.rows(v))
            self.note(each.rows.rows(each.groups.rows(~keep)) & rollouts.kept, text, spread=spread)
        return each.rows.rows(each.groups.rows(keep)) & rollouts.kept
