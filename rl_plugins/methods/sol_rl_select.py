"""The choice of Sol-RL (arXiv 2604.06916): a large pool of rollouts, its best and worst are trained."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Groups, Method, MethodParams, Plan, Rollouts, param
from rl_plugins.kit.oversampling import oversampled, to_keep
from rl_plugins.methods.sol_rl.choice import Mode, places


class SolRlSelect(Method):
    """Draws a large pool of rollouts for each prompt and trains its best and worst.

    For a prompt whose k rollouts are trained, P = ceil(oversample k) are generated. With the rewards d_1 .. d_P in
    descending order, equal ones in the order of generation,

        keep the first floor(k / 2) and the last k - floor(k / 2)

    so an odd k keeps one more of the worst, and k = 1 keeps the worst alone. With `mode: mean_deviation` those farthest
    from the mean of d stay, with `extremes_random` the highest, the lowest and others at random, with `random` any k.

    Reconstruction: the paper trains image models, where the pool is drawn by a cheap copy of the policy and only what
    is kept is made by the policy. On text all P rollouts are made by the same engine. If that engine is quantized, a
    correction of the sampling policy is needed (`dart_tis`, or the host's own).

    Symbols: d (rows,) float64; a rollout of several rows (turns, agents) counts once, with their mean. k is the `n` of
    the plan, plus the spare rollouts of other methods that have not left yet; of a group that was not planned
    floor(P / oversample).

    Special cases: rollouts without a reward (NaN) leave first. They stay only where fewer than k have a reward, so a
    batch is always full. A group of k or fewer stays whole: with `oversample: 1` nothing changes.

    State: what was planned, from `plan` to `select` of one batch. The modes with chance draw from `self.rng`.


    Source: arXiv 2604.06916, two-stage rollout; `select_indices_by_mode` in `train_scripts/sol_rl/train_utils.py` of
    the authors' code, read in a fork at db67d46.
    """

    name = "sol_rl_select"
    fidelity = "code"
    hosts = ("trl", "verl", "diffusion")
    does = "Draws a large pool of rollouts per prompt and trains its best and worst"
    problems = ("no_signal", "few_rollouts")
    keeps_batch_size = True  # as many leave as `plan` asked for in addition

    @dataclass(frozen=True)
    class Params(MethodParams):
        oversample: float = param(4.0, "P / k, rollouts generated per trained rollout (paper: 96 for 24)", ge=1)
        mode: Mode = param("best_worst", "rollouts of the pool that stay; the paper keeps the best and worst")

    def plan(self, plan: Plan) -> Plan:
        """ceil(oversample n) rollouts for every n that are trained."""
        return oversampled(plan, self.params.oversample, self.state)

    def select(self, rollouts: Rollouts) -> Tensor:
        # One entry per rollout, by group and in the order of generation: the order of the rows decides nothing.
        each, groups = rollouts.per_rollout.rows, rollouts.per_rollout.groups
        present = each.max(rollouts.kept.double()) > 0
        reward = torch.where(present, each.mean(rollouts.reward), torch.nan)
        # A number for every rollout, so that those of one group do not depend on what left of another.
        noise = torch.from_numpy(self.rng("kept").random(len(reward)))
        at = present.nonzero()[:, 0]
        inside = Groups(groups.index[at], count=groups.count)
        k = to_keep(self.state, self.params.oversample, groups, present)
        keep = torch.zeros_like(present)
        keep[at] = places(reward[at], inside, k, self.params.mode, noise[at]) >= 0
        self._report(groups, reward, keep, present)
        if self.traced:
            best, least = groups.rows(groups.max(reward)), groups.rows(groups.min(reward))
            text = "reward {reward:.2f} is not among the {mode} of its group ({least:.2f} to {best:.2f})"
            values = {"reward": reward, "least": least, "best": best}
            rows = {name: each.rows(value) for name, value in values.items()}
            self.note(each.rows(present & ~keep), text, mode=self.params.mode, **rows)
        self.state.clear()
        return each.rows(keep)

    def _report(self, groups: Groups, reward: Tensor, keep: Tensor, present: Tensor) -> None:
        kept = torch.where(keep, reward, torch.nan)
        self.log("left", (present & ~keep).sum(), "sum")
        for name, x in (("pool", reward), ("kept", kept)):
            if bool((~torch.isnan(x)).any()):
                self.log(f"{name}_reward", x.nanmean())
                self.log(f"{name}_std", groups.std(x, ddof=0).nanmean())
