"""The `TurnTable` of a batch, from the turns of its rows: what both adapters fill `rollouts.turns` with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.errors import MethodError
from rl_plugins.core.groups import joint, places, spread
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


@dataclass(frozen=True)
class FlatTurns:
    """Turns of some rows, row by row: a batch of agents may have a million, and as objects they take seconds to travel.

    Args:
        count: (rows,) int64 turns of each row.
        start, stop, anchor, reward, valid: of each turn, as in `Turn`.
    """

    count: Tensor
    start: Tensor
    stop: Tensor
    anchor: list[Any]
    reward: Tensor
    valid: Tensor

    @classmethod
    def of(cls, rows: Sequence[Sequence[Turn]]) -> FlatTurns:
        turns = [t for row in rows for t in row]
        n = len(turns)
        return cls(
            count=torch.tensor([len(row) for row in rows], dtype=torch.int64),
            start=torch.from_numpy(np.fromiter((t.start for t in turns), np.int64, n)),
            stop=torch.from_numpy(np.fromiter((t.stop for t in turns), np.int64, n)),
            anchor=[t.anchor for t in turns],
            reward=torch.from_numpy(np.fromiter((t.reward for t in turns), np.float64, n)),
            valid=torch.from_numpy(np.fromiter((t.valid for t in turns), np.bool_, n)),
        )

    @classmethod
    def cat(cls, parts: Sequence[FlatTurns]) -> FlatTurns:
        """Of the rows of all parts, in order."""
        tensors = {
            name: torch.cat([getattr(p, name) for p in parts]) for name in ("count", "start", "stop", "reward", "valid")
        }
        return cls(**tensors, anchor=[a for p in parts for a in p.anchor])


def turn_table(rollouts: Rollouts, turns: FlatTurns) -> TurnTable:
    """One entry per turn, in the order of the rows."""
    each = turns.count
    row = spread(torch.arange(len(each)), each)
    rollout = joint(rollouts.group, rollouts.rollout) if len(each) else torch.empty(0, dtype=torch.int64)
    by_time = torch.sort(rollouts.index, stable=True).indices
    order = by_time[torch.sort(rollout[by_time], stable=True).indices]  # rows by rollout, then place in it
    before = torch.zeros_like(each)  # turns of the rollout in earlier rows
    running = torch.cumsum(each[order], 0) - each[order]
    of = rollout[order]
    first = torch.ones_like(of, dtype=torch.bool)
    first[1:] = of[1:] != of[:-1]
    start = torch.where(first, running, 0).cummax(0).values if len(of) else running
    before[order] = running - start
    turn = before[row] + places(each)
    return TurnTable(row=row, turn=turn, anchor=turns.anchor, reward=turns.reward, valid=turns.valid)


def token_turns(row: Tensor, position: Tensor, turns: FlatTurns) -> Tensor:
    """(tokens,) int64: the turn each token belongs to.

    Args:
        row, position: (tokens,) of each token; positions count everything behind the prompt.
        turns: of every row.

    Raises:
        MethodError: a token belongs to no turn.
    """
    if not len(row):
        return torch.empty(0, dtype=torch.int64)
    if not len(turns.start):
        raise MethodError(_NO_TURN)
    of_row = spread(torch.arange(len(turns.count)), turns.count)
    width = int(max(int(position.max()) + 1, int(turns.stop.max()))) + 1
    # stable: a turn without a token begins where the next one does, and the later of the two has the tokens
    begin, order = torch.sort(of_row * width + turns.start, stable=True)
    found = torch.searchsorted(begin, row * width + position, right=True) - 1
    step = order[found.clamp(min=0)]
    inside = (found >= 0) & (of_row[step] == row) & (position < turns.stop[step])
    if not bool(inside.all()):
        raise MethodError(_NO_TURN)
    return step


_NO_TURN = (
    "a trained token lies outside of every turn. A rollout program marks each of the agent's turns with "
    "`trajectory.turn(start)`; what the agent only reads is added with `observe`."
)
