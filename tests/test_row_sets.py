"""`kit.row_sets`: sets of ranges against sets of Python, and orders of large datasets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.kit import row_sets
from rl_plugins.kit.row_sets import RowSet, shuffled

SIZE = 24
ROWS = st.sets(st.integers(0, SIZE - 1))


def tensor(rows: set[int]) -> torch.Tensor:
    return torch.tensor(sorted(rows, reverse=True), dtype=torch.int64)


def listed(rows: RowSet) -> list[int]:
    found: list[int] = rows.at(np.arange(len(rows))).tolist()
    return found


@settings(max_examples=60, deadline=None)
@given(first=ROWS, second=ROWS, start=st.integers(-2, SIZE + 2), stop=st.integers(-2, SIZE + 2))
def test_sets_of_ranges_are_sets(first: set[int], second: set[int], start: int, stop: int) -> None:
    rows = RowSet.range(0, 0).toggled(tensor(first)).toggled(tensor(second))
    wanted = sorted(first ^ second)
    assert listed(rows) == wanted and len(rows) == len(wanted)
    assert rows.contains(torch.arange(-1, SIZE + 1)).tolist() == [i in wanted for i in range(-1, SIZE + 1)]
    assert listed(rows.others(SIZE)) == sorted(set(range(SIZE)) - set(wanted))
    assert listed(rows.ranked(start, stop)) == wanted[max(0, start) : max(0, stop)]
    assert listed(RowSet.range(start, stop)) == list(range(start, stop))
    assert bool((rows.edges.diff() > 0).all()), "ranges do not touch"


@pytest.mark.parametrize("size", [1, 2, 5, 16, 1000])
def test_an_order_made_place_by_place_is_a_permutation(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [int(i) for i in shuffled([3, 1], size)] == np.random.default_rng([3, 1]).permutation(size).tolist()
    monkeypatch.setattr(row_sets, "_LARGE", 0)
    order = shuffled([3, 1], size)
    assert sorted(order[i] for i in range(size)) == list(range(size))


def test_orders_of_large_datasets_are_shuffled_by_their_seed() -> None:
    size, asked = 10**15, 5_000  # as a whole: 8 petabytes
    first, again, other = ([shuffled(seed, size)[i] for i in range(asked)] for seed in (1, 1, 2))
    assert first == again != other and len(set(first)) == asked
    x = np.array(first) / size
    assert abs(x.mean() - 0.5) < 4 / np.sqrt(12 * asked), "alike over the dataset"
    assert abs(np.corrcoef(x[1:], x[:-1])[0, 1]) < 4 / np.sqrt(asked), "neighbours have nothing in common"
    assert abs(np.corrcoef(x, other)[0, 1]) < 4 / np.sqrt(asked)
