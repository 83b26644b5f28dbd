"""MSSR's baseline: the success rate of a prompt, remembered from its earlier rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Groups, Plan, Rollouts, param
from rl_plugins.methods.mssr.tracker import Tracked, TrackerParams

_MIN_VARIANCE = 1e-6


class MssrBaseline(Tracked):
    """One rollout per prompt, with a remembered success rate as baseline (with `mssr_shaping` it is MSSR, else MVSR).

    For the rows i of a generation batch with prompts x_i and rewards r_i:

        raw_i = r_i - v_x                                              v_x = a_x / (a_x + b_x) before this batch
        A_i   = (raw_i - mean raw) / sqrt(max(var raw, 1e-6))          over the batch, population variance

    and then, for every rollout with its outcome o = 1[r > success_threshold]:

        a_x <- rho a_x + o,    b_x <- rho b_x + 1 - o
        rho  = rho_min + (Kbar / target_kl) (rho_max - rho_min)        while Kbar <= target_kl,    else rho_min

    A prompt starts with a + b = 1 / (1 - rho_min) counts (8) in the proportion of `initial_value`, or of its value in
    `value_column`. a + b tends to 1 / (1 - rho). Kbar is the mean KL of the policy to the reference over the last
    `kl_window` batches, this one included: each the mean over rows of the mean over tokens of exp(d) - d - 1, d = log
    pi_ref - log pi_old. `plan` asks for one rollout per prompt, and the driver fills the batch with further prompts.

    Symbols: rewards, raw, A, v (rows,) float64; a, b (dataset size,) float64, keyed by dataset row. Outcomes of a batch
    count in the order of the plan. A rollout of several rows counts once, with their mean.

    Special cases: a row without a reward (NaN) is left out of mean, variance and counts and has A = 0. A batch of one
    scored row is not normalized. Foreign prompts (-1) have the initial value and no counts.

    State: alpha, beta, kl.

    Raises:
        ConfigError: a parameter out of range.

    Source: arXiv 2512.18215; `MVSRValueTracker`, `compute_mvsr_advantage` in the authors' `verl/trainer/core_algos.py`.
    """

    name = "mssr_baseline"
    fidelity = "code"
    does = "Trains one rollout per prompt against the prompt's remembered success rate"
    problems = ("few_rollouts", "no_signal")
    decides_rollouts = True

    @dataclass(frozen=True)
    class Params(TrackerParams):
        normalize: bool = param(True, "normalization by the batch's mean and standard deviation")

    def plan(self, plan: Plan) -> Plan:
        rows = [row.replace(n=min(row.n, 1)) for row in plan.rows]
        return plan.replace(rows=tuple(row.replace(given=row.given[: row.n + row.spare]) for row in rows))

    def advantages(self, rollouts: Rollouts) -> Tensor:
        value = self._values(rollouts.prompt_index)
        raw = rollouts.reward - value
        everything = Groups.one(len(raw))
        self.log("baseline", value.mean())
        self.log("error", everything.mean(raw**2))
        if not self.params.normalize or int(everything.n(raw)) < 2:
            return torch.nan_to_num(raw, nan=0.0)
        scale = torch.sqrt((everything.std(raw, ddof=0) ** 2).clamp(min=_MIN_VARIANCE))
        return torch.nan_to_num((raw - everything.mean(raw)) / scale, nan=0.0)
