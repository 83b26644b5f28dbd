"""More rollouts of every prompt than are trained, of which the method's own `select` keeps as many as were planned.

return oversampled(plan, 2.0, self.state)          # in `plan`
k = to_keep(self.state, 2.0, groups, present)      # in `select`
self.state.clear()
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.groups import Groups
from rl_plugins.core.rollouts import Plan


def pool_size(n: int, share: float) -> int:
    """ceil(share n), rollouts that are made for n trained ones."""
    return math.ceil(n * share - 1e-9)  # 50 * 1.1 is 55.00000000000001


def oversampled(plan: Plan, share: float, state: dict[str, Any]) -> Plan:
    """`plan` with spare rollouts up to `pool_size` of each row. What was planned is noted in the state, by group: not
    in a payload, because a group may have several plan rows."""
    rows, planned = [], dict[str, list[int]]()
    for row in plan.rows:
        ours = pool_size(row.n, share) - row.n
        before = planned.get(str(row.group), [0, 0, 0])
        planned[str(row.group)] = [a + b for a, b in zip(before, (row.n, ours, row.spare), strict=True)]
        rows.append(row.replace(spare=row.spare + ours))
    state.setdefault("planned", {}).update(planned)
    return plan.replace(rows=tuple(rows))


def to_keep(state: Mapping[str, Any], share: float, groups: Groups, present: Tensor) -> Tensor:
    """(groups,) float64 rollouts of each group that stay: those that are trained, and the spare ones of other methods
    that have not left yet. Of a group that was not planned, floor(rollouts / share).

    Args:
        groups: of all rollouts that were made, each once.
        present: (rollouts,) bool, False: it left before.
    """
    planned = [state.get("planned", {}).get(str(g)) for g in groups.ids.tolist()]
    n, ours, others = torch.tensor([p or [0, 0, 0] for p in planned], dtype=torch.float64).reshape(-1, 3).T
    made, left = groups.size.double(), groups.sum((~present).double())
    later = (made - n - ours - others).clamp(min=0)  # methods named after this one asked for more
    unplanned = torch.tensor([p is None for p in planned], dtype=torch.bool)
    return torch.where(unplanned, torch.floor(made / share + 1e-9), n + later + (others - left).clamp(min=0))
