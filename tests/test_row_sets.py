"""`kit.row_sets`: sets of ranges against sets of Python, and orders of large datasets."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from rl_plugins.kit import row_sets
from rl_plugins.kit.row_sets import RowSet, shuffled
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_rollouts, make_run, one_step

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


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("drive", {"sizes": [1, 0.5], "batches": [1]}),
        ("difficulty_slices", {"refresh": 1}),
        ("linear_ts", {"column": "domain"}),
    ],
)
def test_a_batch_makes_nothing_as_large_as_the_dataset(name: str, params: dict[str, Any]) -> None:
    """Where a phase begins, prompts are sorted or an arm is asked for the first time: no array of numpy or torch in it
    has two bytes for every prompt."""
    size = 2**22
    domain = pa.DictionaryArray.from_arrays(pa.array(np.arange(size) % 2), ["a", "b"]).dictionary_decode()
    data = Dataset(pa.table({"domain": domain}))
    stack = build_stack([name], {name: params})
    stack.start(make_run(dataset_size=size, dataset=data, columns=("domain",), total_batches=9))
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as torch_made:
        tracemalloc.start()
        for _ in range(2):
            prompts = [r.prompt_index for r in first_plan(stack, range(4), 4, 16, size, data).rows for _ in range(r.n)]
            meta = {"domain": ["ab"[i % 2] for i in prompts]}
            one_step(stack, make_rollouts([1.0, 0, 0, 0] * 4, prompt_index=prompts, batch=stack.batch, meta=meta))
        numpy_made = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert len(set(prompts)) == 4
    assert max(numpy_made, *(event.cpu_memory_usage for event in torch_made.key_averages())) < 2 * size
