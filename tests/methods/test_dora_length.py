"""The length curriculum of DORA: an independent loop, stages, what does not count, and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Completion, Rollouts
from rl_plugins.methods.dora_length import DoraLength
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_plan, make_rollouts, make_run, one_step, start_stack

LONGEST = 40


def build(**params: Any) -> DoraLength:
    return DoraLength(build_params(DoraLength.Params, params, "dora_length"))


def started(**params: Any) -> MethodStack:
    return start_stack(build(**params), run=make_run(max_completion_length=LONGEST))


def planned(stack: MethodStack, prompts: int = 4, **changes: Any) -> list[Any]:
    plan = make_plan(prompts=prompts)
    rows = tuple(row.replace(**changes) for row in plan.rows)
    return list(stack.call("plan", stack.methods[0], plan.replace(rows=rows)).rows)


def observed(stack: MethodStack, rollouts: Rollouts) -> dict[str, float]:
    one_step(stack, rollouts)
    return {k.removeprefix("dora_length/"): v for k, v in combine([stack.metrics.take()]).items()}


def batch(lengths: list[int], payload: Any, truncated: list[bool] | None = None) -> Rollouts:
    n = len(lengths)
    return make_rollouts([0.0] * n, group_size=n).replace(
        length=torch.tensor(lengths),
        truncated=torch.tensor(truncated or [False] * n),
        payload=[payload] * n if not isinstance(payload, list) else payload,
    )


def percentile(values: list[float], q: float) -> float:
    """Linear interpolation, by hand."""
    values = sorted(values)
    place = q / 100 * (len(values) - 1)
    low = math.floor(place)
    high = min(low + 1, len(values) - 1)
    return values[low] + (place - low) * (values[high] - values[low])


def loop(batches: list[list[tuple[int, bool]]], shares: tuple[float, ...], q: float, threshold: float, window: int):
    """The limits in use, batch by batch, in plain Python."""
    stage, limits = 0, []
    kept: list[list[float]] = []  # by batch
    for rows in batches:
        limit = int(shares[stage] * LONGEST)
        limits.append(limit)
        if stage + 1 == len(shares):
            continue
        kept.append([(limit if cut else min(n, limit)) / limit for n, cut in rows])
        while sum(len(b) for b in kept[1:]) >= window:
            kept.pop(0)
        lengths = [x for b in kept for x in b]
        if len(lengths) >= window and percentile(lengths, q) >= threshold:
            stage, kept = stage + 1, []
    return limits


@given(
    batches=st.lists(st.lists(st.tuples(st.integers(0, LONGEST), st.booleans()), min_size=1, max_size=9), max_size=12),
    q=st.sampled_from([0.0, 50.0, 90.0, 100.0]),
    threshold=st.sampled_from([0.3, 0.8, 1.0]),
    window=st.sampled_from([1, 4, 11]),
)
@settings(max_examples=60, deadline=None)
def test_limits_are_those_of_a_plain_loop(batches: Any, q: float, threshold: float, window: int) -> None:
    shares = (0.25, 0.5, 0.8)
    stack = started(shares=shares, percentile=q, threshold=threshold, window=window)
    limits = []
    for rows in batches:
        row = planned(stack)[0]
        limits.append(row.max_tokens)
        lengths = [min(n, row.max_tokens) for n, _ in rows]
        observed(stack, batch(lengths, row.payload, [cut for _, cut in rows]))
    assert limits == loop(batches, shares, q, threshold, window)
    assert limits == loop([rows[::-1] for rows in batches], shares, q, threshold, window), "in any order of rows"


@pytest.mark.parametrize("lengths", [[0] * 4 + [30] * 4, [30] * 4 + [0] * 4])
def test_a_batch_larger_than_the_window_counts_as_a_whole(lengths: list[int]) -> None:
    stack = started(window=4, percentile=40.0)
    assert observed(stack, batch(lengths, planned(stack)[0].payload))["percentile"] == 0.0
    assert planned(stack)[0].max_tokens == 30


def test_the_oldest_batch_leaves_when_the_others_fill_the_window() -> None:
    stack = started(window=4, percentile=0.0)
    payload = planned(stack)[0].payload
    assert "percentile" not in observed(stack, batch([1] * 3, payload))
    assert observed(stack, batch([28, 29, 29], payload))["percentile"] == pytest.approx(1 / 30), "3 are too few"
    assert observed(stack, batch([28], payload))["percentile"] == pytest.approx(28 / 30)


def test_it_rises_once_and_counts_again() -> None:
    stack = started(window=8)
    first = planned(stack)
    assert [r.max_tokens for r in first] == [30] * 4 and first[0].payload == {"dora_length": 0}
    logged = observed(stack, batch([28] * 7 + [29], first[0].payload))
    assert logged == {"percentile": pytest.approx(28.3 / 30), "stage": 0, "limit": 30, "counted": 8}  # below 0.95
    logged = observed(stack, batch([29] * 8, first[0].payload))
    assert logged == {"percentile": pytest.approx(29 / 30), "stage": 1, "limit": 35, "counted": 8}
    second = planned(stack)[0]
    logged = observed(stack, batch([35] * 4, second.payload))
    assert logged == {"stage": 1, "limit": 35, "counted": 4}, "the window begins again"
    observed(stack, batch([35] * 4, second.payload))
    assert planned(stack)[0].max_tokens == 40
    assert "percentile" not in observed(stack, batch([40] * 8, planned(stack)[0].payload)), "the last stage"


def test_what_does_not_count() -> None:
    """Rollouts of an earlier stage, of rows with a lower limit of their own, and the order of rows."""
    stack = started(window=4)
    payload = planned(stack)[0].payload
    assert planned(stack, max_tokens=7)[0].max_tokens == 7 and planned(stack, max_tokens=7)[0].payload is None
    assert planned(stack, payload={"other": 1})[0].payload == {"other": 1, "dora_length": 0}
    observed(stack, batch([30] * 8, [None, {"dora_length": 1}, "text", {}] * 2))
    assert planned(stack)[0].max_tokens == 30
    mixed = batch([3, 30, 30, 30, 30], [None, payload, payload, payload, payload])
    observed(stack, mixed.subset(torch.tensor([True] * 5)))
    assert planned(stack)[0].max_tokens == 35


def test_rollouts_made_elsewhere_do_not_count() -> None:
    """Replayed, foreign and prefixed rows keep the limit, and say nothing about it."""
    stack = started(window=4)
    given = (Completion((5,) * 38, (-1.0,) * 38),) * 4
    for changes in ({"given": given}, {"prefix": (5, 6)}):
        (row, *_) = planned(stack, **changes)
        assert row.max_tokens == 30 and row.payload is None
        assert planned(stack, payload={"other": 1}, **changes)[0].payload == {"other": 1}
        logged = observed(stack, batch([38] * 8, row.payload))
        assert logged == {"stage": 0, "limit": 30, "counted": 0} and planned(stack)[0].max_tokens == 30


def test_a_rollout_of_several_rows_has_the_length_of_its_longest_row() -> None:
    stack = started(window=2)
    payload = planned(stack)[0].payload
    rows = batch([5, 30, 30, 5], payload)
    rows = rows.replace(rollout=torch.tensor([0, 0, 1, 1]), index=torch.tensor([0, 1, 0, 1]))
    assert observed(stack, rows)["percentile"] == 1.0


def test_wrong_shares_are_told() -> None:
    for shares in ((), (0.5, 0.5), (0.9, 0.5), (0.0, 1.0), (0.5, 1.1)):
        with pytest.raises(ConfigError, match=r"`shares` is .*rising numbers in \(0, 1\]"):
            build(shares=shares)
    with pytest.raises(ConfigError, match=r"no whole token of the completion length \(40\)"):
        started(shares=(0.001, 1.0))
