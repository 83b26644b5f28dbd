"""Costs: totals of several meters, checkpoints, and which samples are new rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rl_plugins.core.errors import StateError
from rl_plugins.core.requests import Generated, Trajectory
from rl_plugins.runtime.costs import Costs, Meter, RowCount, total, union_seconds

spells = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 20)).map(lambda s: (s[0], s[0] + s[1])), max_size=12)


@given(spells)
def test_seconds_of_overlapping_calls_count_once(found: list[tuple[int, int]]) -> None:
    covered = {second for start, stop in found for second in range(start, stop)}
    assert union_seconds(found) == len(covered)
    assert union_seconds(reversed(found)) == len(covered)


def test_a_meter_is_busy_from_the_first_call_to_the_last() -> None:
    now = 0.0
    meter = Meter(lambda: now)
    first, second = meter.busy(), meter.busy()
    first.__enter__()
    now = 1.0
    second.__enter__()
    now = 3.0
    first.__exit__(None, None, None)
    meter.costs.tokens_decoded += 7
    early = meter.take()  # the second call is under way
    now = 4.5
    second.__exit__(None, None, None)
    late = meter.take()
    assert total([early]).engine_seconds == 3.0 and total([late]).engine_seconds == 1.5
    assert total([early, late, (Costs(engine_calls=2), [(2.0, 4.0)])]) == Costs(7, 0, 2, 4.5)
    assert meter.take() == (Costs(), [])


def test_totals_add_up_and_survive_a_checkpoint() -> None:
    one, other = Costs(1, 2, 3, 0.5, 4, 5), Costs(10, 20, 30, 0.25, 40, 50)
    both = one + other
    assert both == Costs(11, 22, 33, 0.75, 44, 55)
    assert Costs.of_checkpoint({"costs": both.plain()}) == both
    assert Costs.of_checkpoint({"batch": 3}) == Costs() == Costs.of_checkpoint(None), "of an earlier version"
    assert Costs.of_checkpoint({"costs": {"tokens_decoded": 3, "of_later": 1}}) == Costs(3)
    assert list(both.logged()) == [
        f"rl_plugins/{name}"
        for name in ("tokens_decoded", "tokens_read", "engine_calls", "engine_seconds", "rows_made")
    ] + ["rl_plugins/rows_trained_total"]


@pytest.mark.parametrize("found", [3, [1], {"tokens_decoded": "many"}, {"tokens_decoded": -1}, {"rows_made": True}])
def test_damaged_totals_are_refused(found: object) -> None:
    with pytest.raises(StateError, match="`costs` of the checkpoint is .* not a number of at least 0 for each of"):
        Costs.of_checkpoint({"costs": found})


def sampled(*tokens: int, version: int = 0) -> Generated:
    return Generated(tokens, (-1.0,) * len(tokens), "stop", version)


def test_turns_continue_a_row_and_branches_are_rows() -> None:
    rows, start = RowCount(), Trajectory((1, 2)).force((3,))
    two = [sampled(5, 6), sampled(5, 6)]
    assert rows.count(start, two) == 2
    turn = start.add(two[0]).observe((9,))
    assert rows.count(turn, [sampled(7)]) == 0, "the next turn, behind what was read"
    assert rows.count(turn, [sampled(8)]) == 0, "that of the other row, which is equal so far"
    assert rows.count(turn, [sampled(4)]) == 1, "both rows go on already: a branch"
    whole = turn.add(sampled(7))
    assert rows.count(whole.cut(1), [sampled(7), sampled(8)]) == 2, "branches in the middle"
    assert rows.count(whole, [sampled(1), sampled(2), sampled(3)]) == 2, "one of them continues the row"
    assert rows.count(start, [sampled(5)]) == 1 and rows.count(start, []) == 0


def test_what_gave_no_token_can_be_tried_again() -> None:
    rows, start = RowCount(), Trajectory((1, 2))
    assert rows.count(start, [sampled()]) == 1
    assert rows.count(start, [sampled(5)]) == 0 and rows.count(start, [sampled(5)]) == 1


@given(st.lists(st.tuples(st.integers(0, 99), st.integers(0, 4)), max_size=12))
def test_rows_are_the_leaves_of_the_tree(requests: list[tuple[int, int]]) -> None:
    """Every node is continued by the samples of one request at most: then rows are nodes without a continuation."""
    rows, count = RowCount(), 0
    nodes, open_ = [Trajectory((1,))], [0]
    children: dict[int, list[int]] = {}
    for number, (which, n) in enumerate(requests):
        if not open_:
            break
        at = open_.pop(which % len(open_))
        made = [sampled(100 * number + k, 7) for k in range(n)]
        count += rows.count(nodes[at], made)
        children[at] = list(range(len(nodes), len(nodes) + n))
        open_ += children[at]
        nodes += [nodes[at].add(one) for one in made]
    leaves = sum(not children.get(i) for i in range(1, len(nodes)))
    assert count == leaves
