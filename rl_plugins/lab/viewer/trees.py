"""The completions of a group as a tree: they share a piece as long as their token ids are equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class SharedPiece:
    """A piece that one or several completions of a group share.

    Args:
        rows: places of these completions in the group.
        start, stop: of the piece in them.
        branches: what follows, where they part.
    """

    rows: tuple[int, ...]
    start: int
    stop: int
    branches: tuple[SharedPiece, ...] = ()


def tree_of(completions: Sequence[Sequence[int]]) -> SharedPiece:
    """The tree of some completions.

    Args:
        completions: token ids.
    """
    arrays = [np.asarray(c, dtype=np.int64) for c in completions]

    def grow(rows: tuple[int, ...], start: int) -> SharedPiece:
        shortest = min(len(arrays[i]) for i in rows)
        first, stop = arrays[rows[0]], shortest
        for i in rows[1:]:
            differs = np.nonzero(arrays[i][start:stop] != first[start:stop])[0]
            stop = start + int(differs[0]) if len(differs) else stop
        parts: dict[int | None, list[int]] = {}
        for i in rows:
            parts.setdefault(int(arrays[i][stop]) if stop < len(arrays[i]) else None, []).append(i)
        if len(parts) == 1:  # one completion, or several that are equal to their end
            return SharedPiece(rows, start, stop)
        return SharedPiece(rows, start, stop, tuple(grow(tuple(part), stop) for part in parts.values()))

    return grow(tuple(range(len(arrays))), 0)
