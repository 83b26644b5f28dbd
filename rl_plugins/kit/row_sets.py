"""Sets and orders of dataset rows at a cost that the dataset's size does not enter.

A set is held as the ends of its ranges, so one that differs from a few ranges by some rows takes their memory:

    rows = RowSet.range(0, size)
    rows = rows.toggled(solved)              without these
    rows.contains(prompts), len(rows)
    rows.at(order[place])                    its member of that rank
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
from torch import Tensor

_LARGE = 2**20  # rows above which an order is not made as a whole
_ROUNDS = 4


@dataclass(frozen=True)
class RowSet:
    """A set of rows: those r with edges[0] <= r < edges[1], edges[2] <= r < edges[3], and so on.

    Args:
        edges: (2 x ranges,) int64, ascending, each once; the part that a method saves.
    """

    edges: Tensor

    @classmethod
    def range(cls, start: int, stop: int) -> RowSet:
        """The rows start..stop-1, none if start >= stop."""
        return cls(torch.tensor([start, stop] if start < stop else [], dtype=torch.int64))

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def contains(self, rows: Tensor) -> Tensor:
        """(n,) int64 -> (n,) bool."""
        return torch.searchsorted(self.edges, rows.contiguous(), right=True) % 2 == 1

    def toggled(self, rows: Tensor) -> RowSet:
        """Without those of the rows that are in it, and with the others.

        Args:
            rows: (n,) int64, each once.
        """
        return _once(self.edges, rows, rows + 1)

    def others(self, size: int) -> RowSet:
        """Rows of a dataset of that size that are not in it."""
        return _once(self.edges, torch.tensor([0, size]))

    def at(self, ranks: Any) -> Any:
        """The rows with these ranks among its own in ascending order, 0 for the first: int -> int, or arrays."""
        place = np.searchsorted(self._ends, ranks, side="right")
        return self.edges.numpy()[2 * place + 1] - (self._ends[place] - ranks)

    def ranked(self, start: int, stop: int) -> RowSet:
        """Its rows with the ranks start..stop-1; none where start >= stop."""
        start, stop = max(0, start), min(stop, len(self))
        if start >= stop:
            return RowSet(self.edges[:0])
        first, last = int(self.at(start)), int(self.at(stop - 1))
        inner = self.edges[(self.edges > first) & (self.edges <= last)]
        return RowSet(torch.cat([torch.tensor([first]), inner, torch.tensor([last + 1])]))

    @cached_property
    def _ends(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """(ranges,) rows of each range and of those before it."""
        found: np.ndarray[Any, np.dtype[np.int64]] = (self.edges[1::2] - self.edges[::2]).cumsum(0).numpy()
        return found


def _once(*edges: Tensor) -> RowSet:
    """What lies between these edges: two equal ones cancel each other."""
    found, times = torch.unique(torch.cat(edges), return_counts=True)
    return RowSet(found[times % 2 == 1])


def shuffled(seed: int | Sequence[int] | np.random.Generator, size: int) -> Any:
    """A permutation of 0..size-1, to be asked for the number at a place: `shuffled(seed, size)[place]`.

    Up to 2^20 numbers it is numpy's `permutation`. That takes 0.4 s for 10^7; above, a number is made where it is
    asked for, by a Feistel network (Luby and Rackoff 1988) over the next power of 4, gone through until it is in range.
    """
    return np.random.default_rng(seed).permutation(size) if size <= _LARGE else _Feistel(seed, size)


class _Feistel:
    def __init__(self, seed: Any, size: int) -> None:
        self._size, self._key = size, np.random.default_rng(seed).bytes(32)
        self._bits = ((size - 1).bit_length() + 1) // 2

    def __getitem__(self, place: int) -> int:
        while True:
            left, right = divmod(int(place), 1 << self._bits)
            for number in range(_ROUNDS):
                digest = blake2b(b"%d %d" % (number, right), digest_size=8, key=self._key).digest()
                left, right = right, left ^ int.from_bytes(digest, "little") % (1 << self._bits)
            place = (left << self._bits) + right
            if place < self._size:
                return place
