"""Rollouts per task of DART (arXiv 2509.23866): fewer for tasks that mostly succeed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Groups, Idle, Method, Plan, Rollouts, Run, Tokens, param
from rl_plugins.kit.prompt_memory import SuccessParams
from rl_plugins.kit.start_checks import refuse_whole_group
from rl_plugins.methods.dart.history import TaskHistory, scored, success_rate


class DartRollouts(Method):
    """Plans fewer rollouts for tasks whose success rate is high.

    Per prompt with success rate a, of the N rollouts of the host:

        n = N                                          if a < threshold, or a = 0, or nothing is known
        n = min(N, max(n_min, floor(9 / a - 7)))       else

    a is the share of successes among the latest n' rollouts of the prompt, where n' is the number that the formula
    gave at its last visit. Rows that become free go to further prompts of the dataset.

    Symbols: rewards float64, a success is a reward of at least `success_threshold`.

    Special cases: rollouts without a reward (NaN) and stored ones of `dart_pool` do not count. A rollout of several
    rows counts once. Foreign prompts (-1) keep the host's number.

    State: the latest N outcomes and n' of every prompt that was seen, 8 (N + 2) bytes each.

    Raises:
        ConfigError: `n_min` not below the host's rollouts per prompt.

    Source: arXiv 2509.23866, section on dynamic rollout frequency; src/core/task_loader.py of dart_rollouter
    (get_dynamic_rollout_n).
    """

    name = "dart_rollouts"
    fidelity = "code"
    does = "Generates fewer rollouts for tasks that the policy mostly solves"
    problems = ("too_easy", "no_signal")
    needs = frozenset({"prompt_index"})
    decides_rollouts = True
    idle = (Idle({"eased": 0}, "no task has reached `threshold`, or none was visited twice."),)

    @dataclass(frozen=True)
    class Params(SuccessParams):
        threshold: float = param(0.6, "lowest success rate that gives a task fewer rollouts; above 1: none does", ge=0)
        n_min: int = param(1, "fewest rollouts of a task", ge=1)

    def check(self, run: Run) -> None:
        refuse_whole_group(run, "n_min", self.params.n_min, "no task ever gets fewer")

    def start(self, run: Run) -> None:
        self.state = {"outcomes": TaskHistory.empty(run.group_size).state(), "planned": TaskHistory.empty(1).state()}

    def plan(self, plan: Plan) -> Plan | None:
        own = [i for i, row in enumerate(plan.rows) if row.prompt_index >= 0 and row.n]
        if not own:
            return None
        n = self._n(torch.tensor([plan.rows[i].prompt_index for i in own]), plan.group_size)
        rows = list(plan.rows)
        for i, k in zip(own, n.tolist(), strict=True):
            rows[i] = rows[i].replace(n=k)
        return plan.replace(rows=tuple(rows))

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        outcomes, planned = self._history()
        most = outcomes.outcome.shape[1]
        prompts = Groups(rollouts.prompt_index[rollouts.prompt_index >= 0]).ids
        n = self._n(prompts, most)  # as it was planned: nothing was learned since
        self.log("rollouts", n.double().mean())
        self.log("eased", (n < most).double().mean())
        outcomes = outcomes.add(*scored(rollouts, self.params))
        planned = planned.add(prompts, n)
        self.state = {"outcomes": outcomes.state(), "planned": planned.state()}
        self.log("success_rate", success_rate(outcomes.outcome, most).mean())

    def _history(self) -> tuple[TaskHistory, TaskHistory]:
        return TaskHistory.of_state(self.state["outcomes"]), TaskHistory.of_state(self.state["planned"])

    def _n(self, prompts: Tensor, most: int) -> Tensor:
        outcomes, planned = (history.of(prompts) for history in self._history())
        latest = torch.where(torch.isnan(planned[:, 0]), float(most), planned[:, 0])
        return rollouts_for(success_rate(outcomes, latest), most, self.params.threshold, self.params.n_min)


def rollouts_for(rate: Tensor, most: int, threshold: float, least: int) -> Tensor:
    """(prompts,) float64 success rates, NaN where nothing is known -> (prompts,) int64 rollouts."""
    fewer = torch.floor(9 / rate - 7).clamp(min=least, max=most)
    return torch.where((rate >= threshold) & (rate > 0), fewer, float(most)).long()
