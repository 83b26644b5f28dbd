"""Turns per task of DART (arXiv 2509.23866): as many as the longest success needed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rl_plugins import Groups, Idle, Method, Plan, Rollouts, Run, Tokens, param
from rl_plugins.kit.prompt_memory import SuccessParams
from rl_plugins.methods.dart.history import TaskHistory, is_stored


class DartLength(Method):
    """Limits the turns of a task to those of its longest successful rollout.

    Per prompt that was solved before:

        limit = turns of its longest successful rollout + slack

    A prompt that was never solved has no limit from this method; that of the agent's own method holds (its
    `max_turns` or `hard_cap`), as always if it is lower.

    Symbols: a success is a reward of at least `success_threshold`; turns are those of the agent.

    Special cases: rollouts without a reward (NaN) do not count, nor do stored ones of `dart_pool`. The turns of a
    rollout of several rows are added up. Foreign prompts (-1) have no limit. A successful rollout without a turn counts
    as one turn. Evaluation is not limited.

    State: the limit of every prompt that was solved, 16 bytes each.

    Source: arXiv 2509.23866, section on dynamic trajectory length. The released code has a fixed number of steps.
    """

    name = "dart_length"
    fidelity = "paper"
    does = "Limits an agent's turns per task to those that its longest success needed"
    problems = ("agents", "length")
    needs = frozenset({"prompt_index", "turns", "turn_limits"})
    idle = (Idle({"limited": 0}, "no task of the batch was solved before."),)

    @dataclass(frozen=True)
    class Params(SuccessParams):
        slack: int = param(0, "number of turns that are added to those of the longest success", ge=0)

    def start(self, run: Run) -> None:
        self.state = TaskHistory.empty(1).state()

    def plan(self, plan: Plan) -> Plan | None:
        longest = self._longest(torch.tensor([row.prompt_index for row in plan.rows], dtype=torch.int64))
        limits = [None if most != most else int(most) + self.params.slack for most in longest.tolist()]
        rows = [
            row if limit is None else row.replace(max_turns=min(limit, row.max_turns or limit))
            for row, limit in zip(plan.rows, limits, strict=True)
        ]
        return plan.replace(rows=tuple(rows))

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        once, table = rollouts.per_rollout, rollouts.turns
        assert table is not None  # in `needs`
        turns = torch.bincount(once.rows.index[table.row], minlength=once.rows.count).clamp(min=1)
        longest = self._longest(once.prompt_index)
        limited = ~torch.isnan(longest)
        success = once.reward >= self.params.success_threshold  # False for NaN
        own = (once.prompt_index >= 0) & ~is_stored(rollouts)[once.last]
        prompts = Groups(once.prompt_index)
        self.log("limited", prompts.max(limited.double()).mean())
        if bool(limited.any()):
            self.log("limit", prompts.max(longest + self.params.slack).nanmean())
        self.log("cut", (limited & ~success & (turns >= longest + self.params.slack)).double().mean())
        solved = Groups(once.prompt_index[own & success])
        most = torch.fmax(solved.max(turns[own & success].double()), self._longest(solved.ids))
        self.state = TaskHistory.of_state(self.state).add(solved.ids, most).state()

    def _longest(self, prompts: torch.Tensor) -> torch.Tensor:
        """(n,) turns of the longest success of each prompt, NaN without one."""
        return TaskHistory.of_state(self.state).of(prompts)[:, 0]
