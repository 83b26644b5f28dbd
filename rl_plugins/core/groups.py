"""Statistics per group of rollouts: ragged, interleaved, empty groups and NaN (unscorable) rows are ordinary inputs.

    groups = rollouts.groups
    centered, std = groups.center_and_std(rollouts.reward)
    advantages = centered / groups.rows(std + 1e-4)

A statistic is a tensor of one number per group, shape (count,); `rows` spreads it back over the rows, shape (rows,).
NaN values are left out of every statistic; a group without a single value has the statistic NaN. Everything is float64:
in float32 identical rewards leave residues that a small epsilon blows up into advantages of 0.6. Deviations are taken
from a value of the group itself, so a group of identical values has exactly that mean and exactly the deviation 0.

There is no Python loop over rows. Equal groups that lie contiguously are reshaped instead of scattered, and rows are
looked at one by one for NaN only if their sum says that there is one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

_PART = 32_768  # a few arrays of so many float64 stay in the cache of a core


def parts(size: int) -> Iterator[slice]:
    """Slices that cover 0..size-1. A rule of several operations per token is applied part by part, because arrays of
    all tokens between the operations cost more than the operations."""
    return (slice(i, i + _PART) for i in range(0, size, _PART))


def empty(size: int) -> Tensor:
    """(size,) float64 to be filled in parts. numpy asks the system for large pages, which torch does not."""
    return torch.from_numpy(np.empty(size))


class Groups:
    """Which rows belong together.

    Args:
        ids: (rows,) integer, any numbers in any order; rows with the same number form a group.
        count: if given, `ids` are already 0..count-1 and groups without a row exist (their statistics are NaN).

    Attributes:
        ids: (count,) int64 the group numbers, ascending.
        count: number of groups.
        width: rows per group if every group has as many and lies contiguously, in ascending order; else None.
    """

    def __init__(self, ids: Tensor, count: int | None = None) -> None:
        if ids.ndim != 1 or ids.is_floating_point():
            raise ValueError(f"group ids must be one integer per row, got shape {tuple(ids.shape)} of {ids.dtype}.")
        self._shape, ids = ids.shape, ids.long().contiguous()
        self.width = _regular_width(ids) if count is None else None
        if self.width:
            self.ids = ids[:: self.width]
        elif count is None:
            self.ids, self.index, self.size = _numbered(ids)
        else:
            self.ids, self.index = torch.arange(count, device=ids.device), ids
            low, high = (int(ids[0]), int(ids[-1])) if self._in_order else _ends(ids)
            if len(ids) and (low < 0 or high >= count):
                raise ValueError(f"group ids must lie in 0..{count - 1}, got {low}..{high}.")
        self.count = len(self.ids)

    @classmethod
    def one(cls, rows: int) -> Groups:
        """All rows are one group, also if there is none."""
        groups = cls.__new__(cls)
        groups._shape, groups.width, groups.ids, groups.count = (
            torch.Size([rows]),
            rows or None,
            torch.zeros(1).long(),
            1,
        )
        if not rows:
            groups.index = torch.zeros(0, dtype=torch.int64)
        return groups

    @cached_property
    def index(self) -> Tensor:
        """(rows,) the position of each row's group in `ids`."""
        return self.rows(torch.arange(self.count, device=self.ids.device))

    @cached_property
    def size(self) -> Tensor:
        """(count,) int64 rows per group, NaN rows included."""
        if self.width:
            return torch.full_like(self.ids, self.width)
        if self._in_order:
            return torch.searchsorted(self.index, torch.arange(self.count + 1, device=self.ids.device)).diff()
        return torch.bincount(self.index, minlength=self.count)

    @cached_property
    def _in_order(self) -> bool:
        """The groups lie one behind the other, in ascending order."""
        return len(self.index) > 0 and bool((self.index[1:] >= self.index[:-1]).all())

    def rows(self, statistic: Tensor) -> Tensor:
        """(count,) -> (rows,): every row gets the value of its group."""
        return statistic.repeat_interleave(self.width, 0) if self.width else statistic.index_select(0, self.index)

    def n(self, x: Tensor) -> Tensor:
        """Number of values (rows that are not NaN) of each group, (count,) float64."""
        x, finite = self._checked(x)
        return self.size.double() if finite else self._sum((~torch.isnan(x)).double())

    def sum(self, x: Tensor) -> Tensor:
        """Sum of the values; 0 for a group without any."""
        return self._sum(*self._checked(x))

    def mean(self, x: Tensor) -> Tensor:
        """Mean of the values."""
        if self.width:
            n, anchor, deviation, finite = self._from_member(x)
            return anchor + self._sum(deviation, finite) / n
        finite = self._finite(x)
        n, anchor = self._member(x, finite)
        total = torch.zeros_like(anchor)
        for part in parts(len(x)):
            index = self.index[part]
            deviation = x[part].double() - anchor.index_select(0, index)
            if not finite:
                deviation = deviation.nan_to_num_(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
            total.scatter_add_(0, index, deviation)
        return anchor + total / n

    def std(self, x: Tensor, ddof: int = 1) -> Tensor:
        """Standard deviation with divisor n - ddof; 0 where n <= ddof (a group of one has no spread to divide by)."""
        return self.center_and_std(x, ddof)[1]

    def center_and_std(self, x: Tensor, ddof: int = 1) -> tuple[Tensor, Tensor]:
        """(rows,) differences from the mean of the group, NaN for NaN, and (count,) `std`, for little more than one of
        them costs."""
        n, _, deviation, finite = self._from_member(x)
        shift = self._sum(deviation, finite) / n
        centered = self._minus(deviation, shift)
        square = self._sum(centered * centered, finite)
        if isinstance(n, int):
            return centered, (square / (n - ddof)).sqrt_() if n > ddof else torch.zeros_like(square)
        return centered, torch.where(n > ddof, (square / (n - ddof)).sqrt_(), shift - shift)  # 0, or NaN without values

    def min(self, x: Tensor) -> Tensor:
        """(count,) smallest value."""
        return self._extreme(x, "amin")

    def max(self, x: Tensor) -> Tensor:
        """(count,) largest value."""
        return self._extreme(x, "amax")

    def median(self, x: Tensor, upper: bool = False) -> Tensor:
        """Lower (default) or upper median: always one of the values, never the mean of two."""
        x = x.double()
        row = self.median_row(x, upper)
        return torch.where(row < 0, torch.nan, x[row.clamp(min=0)]) if len(x) else row.double() * torch.nan

    def median_row(self, x: Tensor, upper: bool = False) -> Tensor:
        """(count,) the row that holds the median, -1 for a group without values. Of several rows with the median's
        value it is the one in the middle place of a stable sort, which is the row torch.median picks on CPU."""
        order, start = self._sorted(x)
        n = self.n(x).long()
        place = start + (n // 2 if upper else (n - 1) // 2)
        return torch.where(n > 0, order[place.clamp(0, max(len(order) - 1, 0))] if len(order) else -1, -1)

    def mad(self, x: Tensor) -> Tensor:
        """Median absolute deviation from the median, lower medians, without a consistency factor."""
        return self.median((x.double() - self.rows(self.median(x))).abs())

    def rank(self, x: Tensor) -> Tensor:
        """(rows,) rank inside the group, 1 for the smallest, ties get their average, NaN stays NaN."""
        x = x.double()
        order, start = self._sorted(x)
        value, group = x[order], self.index[order]
        first = torch.ones(len(order), dtype=torch.bool, device=x.device)  # of several equal values
        first[1:] = (value[1:] != value[:-1]) | (group[1:] != group[:-1])
        tie = torch.cumsum(first, 0) - 1
        place = (torch.arange(len(order), device=x.device) - start[group] + 1).double()
        average = torch.bincount(tie, place).double() / torch.bincount(tie)
        rank = torch.empty_like(x)
        rank[order] = average[tie]
        return torch.where(torch.isnan(x), torch.nan, rank)

    def leave_one_out(self, x: Tensor) -> Tensor:
        """(rows,) mean of the other values of the group; NaN where there is no other, or the value itself is NaN."""
        x = x.double()
        mean, n = self.rows(self.mean(x)), self.rows(self.n(x))
        return torch.where(n > 1, mean + (mean - x) / (n - 1), torch.nan)

    def place(self, x: Tensor) -> Tensor:
        """(rows,) int64 place in the group from the largest value, from 0. Of equal values the earlier row comes first;
        NaN comes last."""
        order, start = self._sorted(-x.double())
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=x.device) - self.rows(start)[order]
        return place

    def top_k(self, x: Tensor, k: int | Tensor) -> Tensor:
        """(rows,) mask of the k largest values of each group (k: one number, or one per group). Of equal values the
        earlier row wins; NaN never does."""
        limit = self.rows(torch.as_tensor(k, device=x.device).expand(self.count))
        return (self.place(x) < limit) & ~torch.isnan(x)

    def _finite(self, x: Tensor) -> bool:
        """True if no value is NaN or infinite (one sum tells, without looking at each)."""
        if x.shape != self._shape:
            raise ValueError(f"values must be one per row, {tuple(self._shape)}, got shape {tuple(x.shape)}.")
        return math.isfinite(x.sum().item())

    def _checked(self, x: Tensor) -> tuple[Tensor, bool]:
        """`x` in float64, and whether it is finite."""
        return x.double(), self._finite(x)

    def _member(self, x: Tensor, finite: bool) -> tuple[Tensor | int, Tensor]:
        """n, and of each group the value of the last row that has one, so that a NaN row changes nothing for the
        others; 0 if infinite."""
        if finite and self.width:
            return self.width, x[self.width - 1 :: self.width].double()
        anchor, n = torch.zeros(2, self.count + 1, dtype=torch.float64, device=x.device)  # one group more, for NaN
        if finite and self._in_order:
            some, last = self.size > 0, torch.cumsum(self.size, 0) - 1
            anchor[:-1][some] = x[last[some]].double()
            return self.size, anchor[:-1]
        for part in parts(len(x)):
            value = x[part].double()
            index = self.index[part].masked_fill(torch.isnan(value), self.count)
            anchor.scatter_(0, index, value)
            n.scatter_add_(0, index, torch.ones_like(value))
        return n[:-1], anchor[:-1].nan_to_num(posinf=0.0, neginf=0.0)

    def _from_member(self, x: Tensor) -> tuple[Tensor | int, Tensor, Tensor, bool]:
        """`_member`, the differences of the rows from it, and whether all values are finite."""
        x, finite = self._checked(x)
        n, anchor = self._member(x, finite)
        return n, anchor, self._minus(x, anchor), finite

    def _minus(self, x: Tensor, statistic: Tensor) -> Tensor:
        """`x - self.rows(statistic)`"""
        if self.width:
            return (x.view(self.count, self.width) - statistic[:, None]).view(-1)
        return x - self.rows(statistic)

    def _sum(self, x: Tensor, finite: bool = True) -> Tensor:
        """Sum per group, leaving NaN out if there can be one."""
        if self.width:
            x = x.view(self.count, self.width)
            return x.sum(1) if finite else x.nansum(1)
        x = x if finite else x.nan_to_num(nan=0.0, posinf=torch.inf, neginf=-torch.inf)
        if self._in_order:
            return torch.segment_reduce(x, "sum", lengths=self.size, initial=0.0)
        return x.new_zeros(self.count).scatter_add_(0, self.index, x)

    def _extreme(self, x: Tensor, reduce: str) -> Tensor:
        x, finite = self._checked(x)
        empty = torch.inf if reduce == "amin" else -torch.inf
        filled = x if finite else x.nan_to_num(nan=empty, posinf=torch.inf, neginf=-torch.inf)
        if self.width:
            out = getattr(filled.view(self.count, self.width), reduce)(1)
        elif self._in_order:
            out = torch.segment_reduce(filled, reduce[1:], lengths=self.size, initial=empty)
        else:
            out = torch.full((self.count,), empty, dtype=torch.float64, device=x.device)
            out = out.scatter_reduce(0, self.index, filled, reduce)
        return torch.where(self.n(x) > 0, out, torch.nan)

    def _sorted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ordered by (group, value), NaN last in its group, ties in row order; and where each group starts."""
        x, start = self._checked(x)[0], torch.cumsum(self.size, 0) - self.size
        if self.width:
            order = torch.sort(x.view(self.count, self.width), dim=1, stable=True).indices
            return (order + start[:, None]).flatten(), start
        widest = int(self.size.max()) if self.count else 0
        if self.count * widest > 4 * len(x):  # a few groups are much larger than the rest
            by_value = torch.sort(x, stable=True).indices
            return by_value[torch.sort(self.index[by_value], stable=True).indices], start
        by_group = None if self._in_order else torch.sort(self.index, stable=True).indices
        inside = torch.arange(widest, device=x.device) < self.size[:, None]
        padded = x.new_full((self.count, widest), torch.nan)
        padded[inside] = x if by_group is None else x[by_group]
        order = (torch.sort(padded, dim=1, stable=True).indices + start[:, None])[inside]  # of equal values, NaN too,
        return order if by_group is None else by_group[order], start  # those of the group come before the padding


def places(size: Tensor) -> Tensor:
    """(blocks,) sizes, on the CPU -> (sum of them,) int64: the place of each entry in its block, from 0."""
    numbers = np.arange(int(size.max()) if len(size) else 0)
    return torch.from_numpy(np.concatenate([numbers[:0], *(numbers[:n] for n in size.tolist())]))


def spread(values: Tensor, size: Tensor) -> Tensor:
    """(blocks,) values and sizes, on the CPU -> (sum of sizes,): each entry has the value of its block. A quarter of
    the time of torch.repeat_interleave."""
    return torch.from_numpy(np.repeat(values.numpy(), size.numpy()))


def count_true(mask: Tensor, size: Tensor) -> Tensor:
    """(entries,) bool in blocks of these sizes, on the CPU -> (blocks,) int64: how many of each block are True."""
    stop, entries = torch.cumsum(size, 0).tolist(), mask.numpy()
    counts = (np.count_nonzero(entries[i:j]) for i, j in zip([0, *stop], stop, strict=False))
    return torch.from_numpy(np.fromiter(counts, np.int64, len(stop)))


def joint(first: Tensor, *others: Tensor) -> Tensor:
    """(n,) int64: equal numbers, from 0, where all keys are equal. Numbers follow the order of the keys' values."""
    index = Groups(first).index
    for key in others:
        values = Groups(key)
        index = Groups(index * values.count + values.index).index
    return index


def _ends(ids: Tensor) -> tuple[int, int]:
    """Smallest and largest, (0, -1) of nothing."""
    if not len(ids):
        return 0, -1
    low, high = torch.aminmax(ids)
    return int(low.item()), int(high.item())


def _regular_width(ids: Tensor) -> int | None:
    """Rows per group if `ids` is a, a, .., b, b, .. in strictly ascending equal blocks, else None."""
    if not len(ids):
        return None
    # meaningless where ids are not in order, which is checked below
    width = int(torch.searchsorted(ids, ids[0], right=True).item())
    if not width or len(ids) % width:
        return None
    first = ids[::width]
    regular = bool((first[1:] > first[:-1]).all()) and torch.equal(ids, first.repeat_interleave(width))
    return width if regular else None


def _numbered(ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The different numbers ascending, (count,), the place among them of each row's, (rows,), and rows of each."""
    low, high = _ends(ids)
    span = high - low + 1
    if span > 2 * len(ids):
        return torch.unique(ids, return_inverse=True, return_counts=True)
    # numbers close together are counted, not sorted
    index = ids - low if low else ids
    size = torch.bincount(index, minlength=span)
    found = size.nonzero()[:, 0]
    if len(found) < span:
        index, size = (torch.cumsum(size > 0, 0) - 1).index_select(0, index), size[found]
    return found + low if low else found, index, size
