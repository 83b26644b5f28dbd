"""The `TurnTable` of a batch, from the turns of its rows: what both adapters fill `rollouts.turns` with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.errors import MethodError
from rl_plugins.core.groups import joint
from rl_plugins.core.requests import Turn
from rl_plugins.core.rollouts import Rollouts, TurnTable


def spans(mask: Sequence[int], observations: Sequence[Any] = (), rewards: Sequence[float] = ()) -> tuple[Turn, ...]:
    """Turns of a row nobody described: every unbroken run of trained tokens is one.

    Args:
        mask: 1 where a token is trained.
        observations: what was read before each turn; None where that is not known, or where the list ends.
        rewards: of each turn, NaN where the list ends.
    """
    m = torch.tensor([0, *mask, 0], dtype=torch.int8)
    change = m[1:] - m[:-1]
    starts, stops = (change == 1).nonzero()[:, 0].tolist(), (change == -1).nonzero()[:, 0].tolist()
    known, given = len(observations), len(rewards)
    return tuple(
        Turn(a, b, observations[k] if k < known else None, float(rewards[k]) if k < given else math.nan)
        for k, (a, b) in enumerate(zip(starts, stops, strict=True))
    )


def turn_table(rollouts: Rollouts, turns: Sequence[Sequence[Turn]]) -> TurnTable:
    """One entry per turn, in the order of the rows."""
    each = torch.tensor([len(t) for t in turns], dtype=torch.int64)
    row = torch.repeat_interleave(torch.arange(len(turns)), each)
    flat = [t for of_row in turns for t in of_row]
    rollout = joint(rollouts.group, rollouts.rollout) if len(turns) else torch.empty(0, dtype=torch.int64)
    by_time = torch.sort(rollouts.index, stable=True).indices
    order = by_time[torch.sort(rollout[by_time], stable=True).indices]  # rows by rollout, then place in it
    before = torch.zeros_like(each)  # turns of the rollout in earlier rows
    running = torch.cumsum(each[order], 0) - each[order]
    of = rollout[order]
    first = torch.ones_like(of, dtype=torch.bool)
    first[1:] = of[1:] != of[:-1]
    start = torch.where(first, running, 0).cummax(0).values if len(of) else running
    before[order] = running - start
    inside = torch.arange(len(row)) - (torch.cumsum(each, 0) - each)[row]
    return TurnTable(
        row=row,
        turn=before[row] + inside,
        anchor=[t.anchor for t in flat],
        reward=torch.tensor([t.reward for t in flat], dtype=torch.float64),
        valid=torch.tensor([t.valid for t in flat], dtype=torch.bool),
    )


def token_turns(row: Tensor, position: Tensor, turns: Sequence[Sequence[Turn]]) -> Tensor:
    """(tokens,) int64: the turn each token belongs to.

    Args:
        row, position: (tokens,) of each token; positions count everything behind the prompt.
        turns: of every row, in order.

    Raises:
        MethodError: a token belongs to no turn.
    """
    flat = [(r, t.start, t.stop) for r, of_row in enumerate(turns) for t in of_row]
    if not len(row):
        return torch.empty(0, dtype=torch.int64)
    if not flat:
        raise MethodError(_NO_TURN)
    spans_ = torch.tensor(flat, dtype=torch.int64)
    width = int(max(int(position.max()) + 1, int(spans_[:, 2].max()))) + 1
    # stable: a turn without a token begins where the next one does, and the later of the two has the tokens
    order = torch.sort(spans_[:, 0] * width + spans_[:, 1], stable=True).indices
    begin = (spans_[:, 0] * width + spans_[:, 1])[order]
    place = row * width + position
    found = torch.searchsorted(begin, place, right=True) - 1
    step = order[found.clamp(min=0)]
    inside = (found >= 0) & (spans_[step, 0] == row) & (position < spans_[step, 2])
    if not bool(inside.all()):
        raise MethodError(_NO_TURN)
    return step


_NO_TURN = (
    "a trained token lies outside of every turn. A rollout program marks each of the agent's turns with "
    "`trajectory.turn(start)`; what the agent only reads is added with `observe`."
)
