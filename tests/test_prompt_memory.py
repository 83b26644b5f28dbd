"""What is known of prompts, against plain loops; a visit costs what its rows cost."""

from __future__ import annotations

import math
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from operations import allocated

from rl_plugins.kit import prompt_memory
from rl_plugins.kit.prompt_memory import Counts, History, Outcomes, SuccessParams, bins, settled_bins
from rl_plugins.runtime.state import load_state, save_state, snapshot


def rows(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64)


@pytest.mark.parametrize(("small", "recent"), [(0, 0), (0, 4), (0, 65_536), (65_536, 4)])
@pytest.mark.parametrize("others", [1.0, 0.9, 0.05])
def test_counts_are_those_of_a_loop(small: int, recent: int, others: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_memory, "SMALL", small)
    monkeypatch.setattr(prompt_memory, "_MOST_RECENT", recent)
    rng, counts, size = np.random.default_rng(0), Counts(("right", "wrong")), 7
    state = counts.start(size, 0.5)
    assert counts.most(state) == 1.0
    plain = [[0.5, 0.5] for _ in range(size)]
    scales = []
    for batch in range(40):
        visited = rng.choice(size, rng.integers(0, size), replace=False)
        gained = rng.integers(0, 9, (2, len(visited))).astype(float)
        keep = rng.random(len(visited)) if batch % 2 else 0.3
        counts.visit(
            state,
            torch.from_numpy(visited),
            torch.as_tensor(keep, dtype=torch.float64),
            torch.from_numpy(gained),
            others,
        )
        for i in range(size):
            for k in range(2):
                at = visited.tolist().index(i) if i in visited else None
                kept = others if at is None else (float(keep[at]) if batch % 2 else 0.3)
                plain[i][k] = kept * plain[i][k] + (0.0 if at is None else float(gained[k, at]))
        scales += state.get("scales", [1.0])
        found = torch.stack(counts.of(state, slice(None)), 1)
        assert found.numpy() == pytest.approx(np.array(plain), rel=1e-9, abs=1e-300)
        assert torch.equal(torch.stack(counts.of(state, rows(3, 1)), 1), found[[3, 1]])
        assert torch.equal(torch.stack(counts.of(state, slice(1, None, 2)), 1), found[1::2])
        beside = [len(state.get(f"rows_{name}", ())) for name in counts.names]
        assert others < 1 or min(beside) <= (recent if small == 0 else 0)  # one name is settled a visit
        assert state["most"] * (1 + 1e-9) >= found.sum(1).max()
    if small == 0 and others < 1:
        assert min(scales) < 1 and min(scales) >= 1e-6 * others**2
    else:
        assert set(scales) == {1.0}


@pytest.mark.parametrize(("small", "recent"), [(65_536, 0), (0, 0), (0, 3), (0, 65_536)])
def test_visited_rows_are_those_of_all_visits(small: int, recent: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_memory, "SMALL", small)
    monkeypatch.setattr(prompt_memory, "_MOST_RECENT", recent)
    counts, one = Counts(("right", "trials")), torch.ones(2, dtype=torch.float64)
    state = counts.start(10)
    for prompts, seen in ((rows(7, 2), [2, 7]), (rows(2, 9), [2, 7, 9]), (rows(0, 4), [0, 2, 4, 7, 9])):
        counts.visit(state, prompts, 0.5, (0 * one, one))
        assert counts.visited(state, "trials").tolist() == seen


def test_a_visit_costs_what_its_rows_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_memory, "SMALL", 0)
    used = []
    for size in (1_000, 1_000_000):
        counts, history = Counts(), History(8)
        state, past = counts.start(size), history.start(size)
        counts.most(state)
        visited = torch.arange(0, 1000, 4)
        ones = torch.ones(len(visited), dtype=torch.float64)
        history.add(past, visited, ones > 0, 0)

        def work() -> None:
            counts.visit(state, visited, 0.2, (ones, ones), 0.999)  # noqa: B023
            counts.of(state, visited)  # noqa: B023
            history.add(past, visited, ones > 0, 1)  # noqa: B023
            history.rate(past, visited)  # noqa: B023

        used.append(allocated(work))
    assert used[0] == used[1]


def test_a_visit_writes_no_tensor_of_the_dataset_that_a_copy_to_save_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prompt_memory, "SMALL", 0)
    counts, one = Counts(), torch.ones(1, dtype=torch.float64)
    state = counts.start(1000)
    kept = snapshot(state)
    counts.visit(state, rows(7), 0.5, (one, one))
    assert torch._C._is_cow_tensor(state["alpha"]) and torch._C._is_cow_tensor(kept["alpha"])
    again = {**snapshot(state)}
    counts.visit(state, rows(7, 8), 0.5, (one.expand(2), one.expand(2)))
    assert [x.tolist() for x in counts.of(again, rows(7, 8))] == [[1.0, 0.0]] * 2
    assert [x.tolist() for x in counts.of(state, rows(7, 8))] == [[1.5, 1.0]] * 2
    older = {**counts.start(1000, 4.0), "scale": 0.5}
    assert [x.tolist() for x in counts.of(older, rows(7))] == [[2.0]] * 2
    monkeypatch.setattr(prompt_memory, "_MOST_RECENT", 3)
    written = []
    for batch in range(12):
        kept = snapshot(state)
        counts.visit(state, rows(2 * batch, 2 * batch + 1), 0.5, (one.expand(2), one.expand(2)), 0.5)
        written += [[name for name in counts.names if not torch._C._is_cow_tensor(state[name])]]
    assert max(map(len, written)) == 1 and written.count(["alpha"]) > 1 < written.count(["beta"])
    assert [x[:1].tolist() for x in counts.of(state, rows(23))] == [[1.0], [1.0]]


@settings(max_examples=40, deadline=None)
@given(size=st.integers(0, 5), seed=st.integers(0, 10**6))
def test_history_is_that_of_a_loop(size: int, seed: int) -> None:
    rng, history, prompts = np.random.default_rng(seed), History(size), 9
    state = history.start(prompts)
    plain: list[deque[bool]] = [deque(maxlen=size or None) for _ in range(prompts)]
    last = [-1] * prompts
    for batch in range(20):
        visited = rng.choice(prompts, rng.integers(0, prompts), replace=False)
        outcome = rng.random(len(visited)) < 0.5
        history.add(state, torch.from_numpy(visited), torch.from_numpy(outcome), batch)
        for i, right in zip(visited.tolist(), outcome.tolist(), strict=True):
            plain[i].append(right)
            last[i] = batch
        wanted = [sum(p) / len(p) if p else np.nan for p in plain]
        every = torch.arange(prompts)
        np.testing.assert_array_equal(history.rate(state, every).numpy(), np.array(wanted))
        assert history.count(state, every).tolist() == [len(p) for p in plain]
        assert history.last(state, every).tolist() == last
        assert state["used"] == sum(b >= 0 for b in last)
    assert history.rate(state, rows()).shape == (0,)


def test_it_is_saved_and_a_snapshot_stays_as_it_was(tmp_path: object) -> None:
    counts, history = Counts(), History(3)
    state = {"counts": counts.start(6), "history": history.start(6)}
    ones = torch.ones(2, dtype=torch.float64)

    def step(state: dict, batch: int) -> None:
        counts.visit(state["counts"], rows(batch, batch + 1), 0.5, (ones, ones), 0.9)
        history.add(state["history"], rows(batch, batch + 1), torch.tensor([True, batch % 2 == 0]), batch)

    def values(state: dict) -> list[list[float]]:
        every = torch.arange(6)
        return [
            *(c.tolist() for c in counts.of(state["counts"], every)),
            history.last(state["history"], every).tolist(),
        ]

    step(state, 0)
    kept, before = snapshot(state), values(state)
    save_state(str(tmp_path), state)
    step(state, 1)
    assert values(kept) == before != values(state)
    resumed = load_state(str(tmp_path))
    assert resumed is not None
    step(resumed, 1)
    assert values(resumed) == values(state)
    assert torch.equal(history.rate(resumed["history"], rows(0, 1, 2)), history.rate(state["history"], rows(0, 1, 2)))


def test_bins() -> None:
    rate = torch.tensor([0.0, 0.1, 0.25, 0.5, 0.75, 0.999, 1.0], dtype=torch.float64)
    assert bins(rate, 4).tolist() == [0, 0, 1, 2, 3, 3, 3]
    assert bins(rate, 1).tolist() == [0] * 7
    assert bins(rate, [0.1, 0.5]).tolist() == [0, 1, 1, 2, 2, 2, 2]
    assert bins(rate, []).tolist() == [0] * 7


@pytest.mark.parametrize("edges", [4, [0.25, 0.5, 0.75]])
def test_a_prompt_leaves_its_bin_by_a_margin_only(edges: int | list[float]) -> None:
    def after(old: int, rate: float) -> int:
        return int(settled_bins(rows(old), torch.tensor([rate], dtype=torch.float64), edges, 0.03)[0])

    assert [after(-1, r) for r in (0.0, 0.26, 1.0)] == [0, 1, 3], "the first bin is that of the rate"
    assert [after(1, r) for r in (0.5, 0.52, 0.53, 0.79, 1.0)] == [1, 1, 2, 3, 3], "up from [0.25, 0.5)"
    assert [after(1, r) for r in (0.24, 0.23, 0.22, 0.0)] == [1, 1, 0, 0], "down"
    assert [after(3, r) for r in (0.74, 0.73, 0.72, 0.1)] == [3, 3, 2, 0], "the last one, several crossed"
    assert [after(0, 0.0), after(3, 1.0)] == [0, 3]


def test_the_example_of_the_paper() -> None:
    """Ten bins, margin 0.03, ten outcomes remembered: one bin lower per failure after ten successes."""
    history, old, found = History(10), rows(-1), []
    state = history.start(1)
    for batch in range(20):
        history.add(state, rows(0), torch.tensor([batch < 10]), batch)
        old = settled_bins(old, history.rate(state, rows(0)), 10, 0.03)
        found.append(int(old[0]))
    assert found[9:] == [9, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0]


@given(st.lists(st.tuples(st.integers(-1, 4), st.sampled_from([0.0, 0.49, 0.5, 2.0, math.nan])), max_size=12))
def test_outcomes_are_counted_by_prompt(rollouts: list[tuple[int, float]]) -> None:
    prompts = torch.tensor([i for i, _ in rollouts], dtype=torch.int64)
    success = SuccessParams(0.5).successes(torch.tensor([r for _, r in rollouts], dtype=torch.float64))
    seen = Outcomes.of(prompts, success)
    counted: dict[int, list[float]] = {}
    for i, r in rollouts:
        if i >= 0 and r == r:
            counted.setdefault(i, []).append(float(r >= 0.5))
    assert seen.prompts.tolist() == sorted(counted)
    for k, i in enumerate(seen.prompts.tolist()):
        right, n = sum(counted[i]), len(counted[i])
        assert (seen.right[k], seen.wrong[k], seen.trials[k], seen.mixed[k]) == (right, n - right, n, 0 < right < n)
