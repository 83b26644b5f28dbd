"""Which tokens of a row are its hint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from rl_plugins import Rollouts, Tokens

COLUMN = "adhint"  # of a row: first token of its hint and the position after the last one, [0, 0] without a hint


def ranges(rollouts: Rollouts) -> Tensor:
    """(rows, 2) int64: first token of the hint and the position after the last one; equal without a hint."""
    notes: Sequence[Any] = rollouts.meta.get(COLUMN, [None] * len(rollouts))
    found = [note if isinstance(note, list | tuple) and len(note) == 2 else (0, 0) for note in notes]
    return torch.tensor([list(map(int, pair)) for pair in found], dtype=torch.int64).reshape(-1, 2)


def hinted(rollouts: Rollouts) -> Tensor:
    """(rows,) bool: the row begins with a hint."""
    start, stop = ranges(rollouts).T
    return stop > start


def in_hint(rollouts: Rollouts, tokens: Tokens) -> Tensor:
    """(tokens,) bool: the token is of a hint that is trained."""
    start, stop = ranges(rollouts)[tokens.row].T
    return tokens.forced & (tokens.position >= start) & (tokens.position < stop)
