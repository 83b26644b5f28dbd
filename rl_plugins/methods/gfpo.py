"""GFPO (arXiv 2508.09726): samples larger groups and trains the shortest, or those with the most reward per token."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Plan, Rollouts, param
from rl_plugins.kit.oversampling import oversampled, to_keep


class Gfpo(Method):
    """Group filtered policy optimization: of every group only the concise rollouts are trained, and compared.

    For a prompt whose k rollouts are trained, G = ceil(oversample k) are generated; with rewards r_i and lengths L_i

        metric     -L_i (`length`)  or  r_i / L_i (`efficiency`)
        keep       the k rollouts with the largest metric
        A          the estimator's, over the kept rollouts alone

    Symbols: r (rows,) float64; L tokens that may carry a gradient, of all rows of a rollout. k is the `n` of the plan,
    plus the spare rollouts of other methods that have not left yet; of a group that was not planned floor(G /
    oversample).

    Special cases: of equal metrics the earlier rollout stays. Rollouts without a reward (NaN) leave first; they stay
    only where fewer than k have one, so a batch is always full. An empty completion counts as one token. A group of k
    or fewer stays whole. A rollout of several rows counts once, with the mean of their rewards.

    State: what was planned, from `plan` to `select` of one batch.

    Source: arXiv 2508.09726, section 3 and algorithm 1.
    """

    name = "gfpo"
    fidelity = "paper"
    does = "Samples larger groups and trains their shortest rollouts, or those with the most reward per token"
    problems = ("length",)
    keeps_batch_size = True  # as many leave as `plan` asked for in addition

    @dataclass(frozen=True)
    class Params(MethodParams):
        oversample: float = param(2.0, "G / k, rollouts generated per trained rollout (paper: 16 for 8)", ge=1)
        metric: Literal["efficiency", "length"] = param("efficiency", "order of a group: reward per token, or length")

    def plan(self, plan: Plan) -> Plan:
        return oversampled(plan, self.params.oversample, self.state)

    def select(self, rollouts: Rollouts) -> Tensor:
        each, groups, by = rollouts.per_rollout.rows, rollouts.per_rollout.groups, self.params.metric
        present = each.max(rollouts.kept.double()) > 0
        reward = torch.where(present, each.mean(rollouts.reward), torch.nan)
        length = each.sum(rollouts.length.double()).clamp(min=1)
        metric = reward / length if by == "efficiency" else torch.where(torch.isnan(reward), torch.nan, -length)
        # what has left comes after what has no reward
        place = groups.place(torch.where(present, metric.nan_to_num(nan=-torch.finfo(metric.dtype).max), torch.nan))
        keep = present & (place < groups.rows(to_keep(self.state, self.params.oversample, groups, present)))
        self.state.clear()
        self.log("length", length[present].mean())
        self.log("kept_length", length[keep].mean())
        self.log("kept_reward", reward[keep].nanmean())
        self.note(each.rows(present & ~keep), "{by} {metric:.4g}", by=by, metric=each.rows(metric))
        return each.rows(keep)
