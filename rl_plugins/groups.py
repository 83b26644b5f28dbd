"""Statistics per group of rollouts: ragged, interleaved, empty groups and NaN (unscorable) rows are ordinary inputs.

    groups = rollouts.groups
    centered = rollouts.reward - groups.rows(groups.mean(rollouts.reward))

A statistic is a tensor of one number per group, shape (count,); `rows` spreads it back over the rows, shape (rows,).
NaN values are left out of every statistic; a group without a single value has the statistic NaN. Everything is float64:
in float32 identical rewards leave residues that a small epsilon blows up into advantages of 0.6. Deviations are taken
from a value of the group itself, so a group of identical values has exactly that mean and exactly the deviation 0.

There is no Python loop over rows. Equal groups that lie contiguously are reshaped instead of scattered.
"""

from __future__ import annotations

import torch
from torch import Tensor


class Groups:
    """Which rows belong together.

    Args:
        ids: (rows,) integer, any numbers in any order; rows with the same number form a group.
        count: if given, `ids` are already 0..count-1 and groups without a row exist (their statistics are NaN).

    Attributes:
        ids: (count,) the group numbers, ascending.
        index: (rows,) the position of each row's group in `ids`.
        size: (count,) rows per group, NaN rows included.
    """

    def __init__(self, ids: Tensor, count: int | None = None) -> None:
        if ids.ndim != 1 or ids.is_floating_point():
            raise ValueError(f"group ids must be one integer per row, got shape {tuple(ids.shape)} of {ids.dtype}.")
        self.width: int | None = None  # rows per group if every group has as many and lies contiguously
        if count is None:
            self.width = _regular_width(ids)
            if self.width:
                self.ids = ids[:: self.width]
                self.index = torch.arange(len(self.ids), device=ids.device).repeat_interleave(self.width)
            else:
                self.ids, self.index = torch.unique(ids, return_inverse=True)
            count = len(self.ids)
        else:
            if len(ids) and (int(ids.min()) < 0 or int(ids.max()) >= count):
                raise ValueError(f"group ids must lie in 0..{count - 1}, got {int(ids.min())}..{int(ids.max())}.")
            self.ids, self.index = torch.arange(count, device=ids.device), ids.long()
        self.count = count
        self.size = torch.bincount(self.index, minlength=count)

    def rows(self, statistic: Tensor) -> Tensor:
        """(count,) -> (rows,): every row gets the value of its group."""
        return statistic[self.index]

    def n(self, x: Tensor) -> Tensor:
        """Number of values (rows that are not NaN) of each group, (count,) float64."""
        return self._scatter((~torch.isnan(x)).double())

    def sum(self, x: Tensor) -> Tensor:
        """Sum of the values; 0 for a group without any."""
        return self._scatter(torch.nan_to_num(x.double(), nan=0.0, posinf=torch.inf, neginf=-torch.inf))

    def mean(self, x: Tensor) -> Tensor:
        """Mean of the values."""
        x = x.double()
        anchor = self.min(x)  # a member: identical values give exactly that mean
        anchor = torch.where(torch.isinf(anchor), 0.0, anchor)
        return anchor + self.sum(x - self.rows(anchor)) / self.n(x)

    def std(self, x: Tensor, ddof: int = 1) -> Tensor:
        """Standard deviation with divisor n - ddof; 0 where n <= ddof (a group of one has no spread to divide by)."""
        x = x.double()
        n, square = self.n(x), self.sum((x - self.rows(self.mean(x))) ** 2)
        std = torch.sqrt(square / (n - ddof).clamp(min=1))
        return torch.where(n == 0, torch.nan, torch.where(n <= ddof, 0.0, std))

    def min(self, x: Tensor) -> Tensor:
        return self._extreme(x, "amin")

    def max(self, x: Tensor) -> Tensor:
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

    def top_k(self, x: Tensor, k: int | Tensor) -> Tensor:
        """(rows,) mask of the k largest values of each group (k: one number, or one per group). Of equal values the
        earlier row wins; NaN never does."""
        order, start = self._sorted(-x.double())
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=x.device) - self.rows(start)[order]
        limit = self.rows(torch.as_tensor(k, device=x.device).expand(self.count))
        return (place < limit) & ~torch.isnan(x)

    def _scatter(self, x: Tensor) -> Tensor:
        if self.width:
            return x.view(self.count, self.width).sum(1)
        return torch.bincount(self.index, x, minlength=self.count).double()

    def _extreme(self, x: Tensor, reduce: str) -> Tensor:
        x, empty = x.double(), torch.inf if reduce == "amin" else -torch.inf
        filled = torch.nan_to_num(x, nan=empty, posinf=torch.inf, neginf=-torch.inf)
        if self.width:
            out = getattr(filled.view(self.count, self.width), reduce)(1)
        else:
            out = torch.full((self.count,), empty, dtype=torch.float64, device=x.device)
            out = out.scatter_reduce(0, self.index, filled, reduce)
        return torch.where(self.n(x) > 0, out, torch.nan)

    def _sorted(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Rows ordered by (group, value), NaN last in its group, ties in row order; and where each group starts."""
        start = torch.cumsum(self.size, 0) - self.size
        if self.width:
            order = torch.sort(x.double().view(self.count, self.width), dim=1, stable=True).indices
            return (order + start[:, None]).flatten(), start
        by_value = torch.sort(x.double(), stable=True).indices
        return by_value[torch.sort(self.index[by_value], stable=True).indices], start


def _regular_width(ids: Tensor) -> int | None:
    """Rows per group if `ids` is a, a, .., b, b, .. in strictly ascending equal blocks, else None."""
    if not len(ids):
        return None
    if ids[0] == ids[-1]:
        return len(ids) if bool((ids == ids[0]).all()) else None
    width = int((ids != ids[0]).int().argmax())
    if len(ids) % width:
        return None
    blocks = ids.view(-1, width)
    first = blocks[:, 0]
    return width if bool((blocks == first[:, None]).all()) and bool((first[1:] > first[:-1]).all()) else None
