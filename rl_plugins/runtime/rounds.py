"""Rounds of one batch: a method sees the rewards so far and asks for more rollouts until it asks for none."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from rl_plugins.core.errors import MethodError
from rl_plugins.core.groups import Groups
from rl_plugins.core.rollouts import MAX_ROUNDS, GroupSoFar, Plan, PlanRow
from rl_plugins.runtime.plan import next_plan
from rl_plugins.runtime.stack import MethodStack


class Rounds:
    """The account of one batch, on the driver: what was planned, what may still be trained, and when it ends.

    Args:
        stack: the methods.
        first: plan rows of round 0.
        group_size: rollouts per prompt that are trained.
        budget: rows the batch trains.
        pool_size: rows of the dataset, None for a stream.

    Attributes:
        rows: plan rows of all rounds so far, with their payloads.
        number: rounds after the first.
    """

    def __init__(
        self, stack: MethodStack, first: Sequence[PlanRow], group_size: int, budget: int, pool_size: int | None = None
    ) -> None:
        self.stack, self.group_size, self.budget, self.pool_size = stack, group_size, budget, pool_size
        self.rows = list(first)
        self.number = 0

    def more(self, group: Tensor, reward: Tensor) -> tuple[PlanRow, ...]:
        """Plan rows of the next round; none when no method asks for more.

        Args:
            group, reward: (rollouts,) of all that were made so far, those of a group in the order they were planned.

        Raises:
            MethodError: from a hook, for an illegal plan, or when a method asks without an end.
        """
        self.number += 1
        first = {row.group: row for row in reversed(self.rows)}
        made, order = Groups(group), torch.sort(group, stable=True).indices
        split = dict(zip(made.ids.tolist(), torch.split(reward[order], made.size.tolist()), strict=True))
        nothing = reward[:0]
        so_far = tuple(GroupSoFar(row, split.get(g, nothing)) for g, row in sorted(first.items()))
        left = self.budget - sum(row.n for row in self.rows)
        asked = Plan((), self.group_size, left, self.number, so_far, self.stack.batch, first=False)
        plan = next_plan(self.stack, asked, self.pool_size)
        if plan.rows and self.number >= MAX_ROUNDS:
            names = ", ".join(f"`{m.name}`" for m in self.stack.methods if m.rounds)
            raise MethodError(f"{names} asked for more rollouts in {MAX_ROUNDS} rounds of one batch without an end.")
        self.rows += plan.rows
        return plan.rows


def in_rounds(stack: MethodStack) -> bool:
    """Whether a batch of these methods is generated in rounds."""
    return any(m.rounds for m in stack.methods)


def most_in_rounds(stack: MethodStack, plan: Plan) -> tuple[int, int]:
    """Most rounds of a batch with this first plan, and most rollouts that all of them generate."""
    further = [stack.call("further_rounds", m, plan) for m in stack.methods if m.rounds]
    made = sum(max(0, row.n + row.spare - len(row.given)) for row in plan.rows)
    return 1 + max((n for n, _ in further), default=0), made + sum(n for _, n in further)
