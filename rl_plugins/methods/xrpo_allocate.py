"""XRPO's allocator (arXiv 2510.06672): rollouts go to the prompts whose success rate is least certain."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_plugins import Idle, Method, MethodParams, Plan, Run, param
from rl_plugins.core.rollouts import GroupSoFar
from rl_plugins.kit.start_checks import refuse_one_prompt, refuse_whole_group

Array = NDArray[np.float64]


class XrpoAllocate(Method):
    """Spends a batch's rollouts in phases; later phases go to prompts whose mean reward is least certain.

    Every prompt gets `n_first` rollouts. The rest of the batch is divided evenly among phases 2 to `phases` (the
    earlier ones get a remainder). In each of them, with n rewards of deviation s (divisor n - 1) of prompt q,

        h(n)  = t_{1 - alpha/2, n - 1} s / sqrt(n)         half width of the interval of the mean reward
        Pi    = h(n) - h(n + 1) + exploration sqrt(log(1 + T) / n)

    and the rollouts are handed out one by one to the largest Pi; n grows with each, s stays until the phase is
    generated. T counts all rollouts of these prompts so far, including those just handed out. h and Pi are float64, one
    per prompt.

    Special cases: a rollout without a reward (NaN) is not in n. A prompt with fewer than two rewards has s = 0; n
    counts as 1 at least. Among equal Pi the prompt with fewer rollouts comes first, then the one planned first. Prompts
    with given completions (replay) keep their number.

    State: number of rollouts still to be handed out in the batch.

    Raises:
        ConfigError: no rollouts above n_first, or one prompt in a batch.

    Source: arXiv 2510.06672, as read through third parties: h, Pi, alpha and three phases.
    """

    name = "xrpo_allocate"
    fidelity = "abstract"
    does = "Spends a batch's later rollouts where the mean reward is least certain"
    problems = ("few_prompts", "no_signal")
    rounds = True
    decides_rollouts = True
    keeps_batch_size = True  # rollouts are moved between prompts, not taken away
    needs = frozenset({"several_rollouts"})
    idle = (Idle({"moved": 0}, "all groups have the same size. Lower `n_first`, or check whether rewards differ."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        phases: int = param(3, "number of rounds of generation", ge=2, le=32)
        n_first: int | None = param(None, "rollouts of a prompt in the first phase; none: half of the group size", ge=2)
        alpha: float = param(0.05, "alpha, one minus the confidence of the interval", gt=0, lt=1)
        exploration: float = param(0.05, "weight of the bonus for prompts with few rollouts", ge=0)

    def check(self, run: Run) -> None:
        refuse_whole_group(
            run, "n_first", self._first(run.group_size), "later phases have no rollouts to give", least=2
        )
        refuse_one_prompt(run, "there is no other prompt to move rollouts to")

    def start(self, run: Run) -> None:
        self.state = {"left": 0}

    def plan(self, plan: Plan) -> Plan | None:
        """n_first each; in every later round a phase of the rest."""
        p = self.params
        if plan.round == 0:
            first = self._first(plan.group_size)
            rows = tuple(row if row.given else row.replace(n=min(row.n, first)) for row in plan.rows)
            self.state["left"] = plan.trained - sum(row.n for row in rows)
            if not self.state["left"]:
                self.log("moved", 0.0)
            return plan.replace(rows=rows)
        groups = [g for g in plan.so_far if not g.row.given]
        left = min(self.state["left"], plan.budget - plan.trained)
        if plan.round >= p.phases or left <= 0 or not groups:
            return None
        phase = -(-left // (p.phases - plan.round))
        rewards = [g.rewards[~g.rewards.isnan()].double().numpy() for g in groups]
        n, std = np.array([len(r) for r in rewards]), np.array([deviation(r) for r in rewards])
        extra = allocate(n, std, sum(len(g.rewards) for g in groups), phase, p.alpha, p.exploration)
        self.state["left"] = left - phase
        if self.traced:
            width, mean = half_width(std, n, p.alpha), np.array([r.mean() if len(r) else np.nan for r in rewards])
            text = "{more} more rollouts: mean {mean:.2f} +- {half_width:.2f} of {n} rewards"
            self.note([g.row.group for g in groups], text, more=list(extra), mean=mean, half_width=width, n=n)
        if self.state["left"] == 0:
            self._report(groups, extra, half_width(std, n, p.alpha)[std > 0])
        pairs = zip(groups, extra, strict=True)
        return plan.replace(rows=(*plan.rows, *(g.row.replace(n=e, spare=0, given=()) for g, e in pairs if e)))

    def further_rounds(self, plan: Plan) -> tuple[int, int]:
        return min(self.params.phases - 1, plan.budget), plan.budget

    def _first(self, group_size: int) -> int:
        return self.params.n_first or max(2, group_size // 2)

    def _report(self, groups: Sequence[GroupSoFar], extra: Sequence[int], width: Array) -> None:
        size = np.array([len(g.rewards) - g.row.spare + e for g, e in zip(groups, extra, strict=True)])
        self.log("most", int(size.max()), "max")
        self.log("moved", float(np.abs(size - size.mean()).sum() / 2 / size.sum()))
        if len(width):
            self.log("half_width", float(width.mean()))


def deviation(rewards: Array) -> float:
    """Standard deviation with divisor n - 1; 0 for fewer than two rewards. The order of the rewards is of no matter."""
    ordered = np.sort(rewards)
    return float(ordered.std(ddof=1)) if len(ordered) > 1 and ordered[0] != ordered[-1] else 0.0


def half_width(std: Array, n: Array | NDArray[np.int64], alpha: float) -> Array:
    """Half width of the Student-t interval of the mean of n values, elementwise; 0 where std is 0.

    Args:
        std: deviation, divisor n - 1.
        n: values, at least 2 where std is above 0.
    """
    from scipy.stats import t  # takes longer to load than all methods

    return np.asarray(t.ppf(1 - alpha / 2, np.maximum(n, 2) - 1) * std / np.sqrt(np.maximum(n, 1)))


def allocate(
    n: Sequence[int] | NDArray[np.int64],
    std: Sequence[float] | Array,
    drawn: int,
    total: int,
    alpha: float = 0.05,
    exploration: float = 0.05,
) -> list[int]:
    """How many of `total` further rollouts each prompt gets, handed out one by one to the largest priority.

    Args:
        n: (prompts,) rewards so far.
        std: (prompts,) their deviations.
        drawn: rollouts made so far, those without a reward included.
        alpha, exploration: as the parameters.
    """
    first, deviations = np.array(n, dtype=np.int64), np.asarray(std, dtype=np.float64)
    have = first.copy()
    width = half_width(np.ones(1), np.arange(int(have.max()) + total + 2), alpha)  # [n], of a deviation of 1
    for t in range(total):
        gain = deviations * (width[have] - width[have + 1])
        priority = gain + exploration * np.sqrt(math.log(1 + drawn + t) / np.maximum(have, 1))
        best = np.flatnonzero(priority == priority.max())
        have[best[np.argmin(have[best])]] += 1
    return [int(e) for e in have - first]
