"""The group queue: traces of the paper's code, and what must hold for any sequence of calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.tools.disaggregated.queue import GroupQueue

GOLDEN = Golden("rollart")


def all_equal(rewards: Sequence[Any]) -> bool:
    return len(set(rewards)) == 1


def called(queue: GroupQueue, op: Sequence[Any]) -> Any:
    name, *args = op
    if name == "advance":
        return queue.advance(*args)
    if name == "put":
        episode, _, rollout = args  # the step at which it began is not used, in the authors' code neither
        return queue.put(episode, rollout)
    found = queue.ask() if name == "ask" else queue.get()
    if found is None:
        return "blocked"
    if isinstance(found, int):
        return found
    return {"episode": found.episode, "create_step": found.create_step, "rollouts": list(found.rollouts)}


@GOLDEN.kind("ops")
def check_trace(case: Case) -> None:
    p = case.params
    p.must_be("group_filter", "drop if all rewards equal")
    queue = GroupQueue(
        p["group_size"], p["group_size_redundancy"], p["max_traj_per_env"], p["async_generation_ratio"], all_equal
    )
    trace = case.expected["trace"]
    assert len(trace) == len(case.inputs["ops"])
    for op, wanted in zip(case.inputs["ops"], trace, strict=True):
        assert op == wanted["op"]
        result = wanted["result"]
        if isinstance(result, int | str) or result is None:
            assert called(queue, op) == result
        else:
            assert called(queue, op) == {k: result[k] for k in ("episode", "create_step", "rollouts")}
        live = wanted["live_episodes"]
        found = {str(i): [e.create_step, e.started, len(e.finished)] for i, e in queue.live.items()}
        assert list(found) == list(live)
        assert all(found[i] == live[i] for i in live)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


SIZES = st.tuples(st.integers(1, 3), st.integers(0, 2), st.integers(1, 3), st.integers(0, 2))  # G, x, J, a
EVENTS = st.lists(st.sampled_from(["advance", "ask", "ask", "ask", "put", "put", "get", "fail"]), max_size=80)


@given(SIZES, EVENTS, st.data(), st.booleans())
@settings(deadline=None, max_examples=60)
def test_every_rollout_is_trained_or_dropped_once_and_groups_come_in_order(
    sizes: tuple[int, int, int, int], events: list[str], data: Any, filters: bool
) -> None:
    size, spare, per_step, bound = sizes
    queue = GroupQueue(size, spare, per_step, bound, all_equal if filters else None)
    queue.advance(0)
    step, under_way, put, trained, groups = 0, [], [], [], []
    for event in events:
        if event == "advance":
            step += 1
            before = {i for i, e in queue.live.items() if step - e.create_step <= bound}
            queue.advance(step)
            assert before <= set(queue.live)  # a group is kept for `staleness` steps
            assert all(step - e.create_step <= bound for e in queue.live.values())
        elif event == "ask":
            found = queue.ask()
            if found is not None:
                under_way.append(found)
        elif event in ("put", "fail") and under_way:
            episode = under_way.pop(data.draw(st.integers(0, len(under_way) - 1)))
            if event == "fail":
                queue.failed(episode)
            else:
                put.append((episode, len(put) % 2 if filters else len(put)))
                before = set(queue.live)
                filtered = queue.filtered
                queue.put(episode, put[-1][1])
                assert len(set(queue.live) - before) == queue.filtered - filtered  # one replacement for each
                assert len(queue.live) == len(before)
        elif event == "get":
            oldest = next(iter(queue.live), None)
            group = queue.get()
            if group is not None:
                assert group.episode == oldest and len(group.rollouts) == size
                assert step - bound <= group.create_step <= step
                groups.append(group.episode)
                trained += [(group.episode, r) for r in group.rollouts]
        assert all(e.started <= size + spare for e in queue.live.values())
    assert groups == sorted(set(groups))
    assert not Counter(trained) - Counter(put)  # nothing comes twice, nothing is invented
    for episode in groups:  # the first finishers are those that are trained
        mine = [r for e, r in put if e == episode]
        assert [r for e, r in trained if e == episode] == mine[:size]


@given(SIZES, st.integers(1, 8), st.data())
@settings(deadline=None)
def test_the_number_of_live_groups_is_bounded(sizes: tuple[int, int, int, int], steps: int, data: Any) -> None:
    size, spare, per_step, bound = sizes
    eager, idle = (GroupQueue(size, spare, per_step, bound) for _ in range(2))
    most = (bound + 1) * per_step
    for step in range(steps):
        eager.advance(step)
        idle.advance(step)
        assert len(eager.live) <= most
        assert len(idle.live) <= ((2 * bound + 1) * per_step if 0 < step <= bound else most)
        for _ in range(data.draw(st.integers(per_step, per_step + 2))):
            for _ in range(size):
                episode = eager.ask()
                if episode is not None:
                    eager.put(episode, 0)
            eager.get()
    if bound == 0:
        before = set(idle.live)
        idle.advance(steps)
        assert not before & set(idle.live)


def test_a_hung_environment_costs_its_own_group_only_and_nothing_with_redundancy() -> None:
    for spare in (0, 1):
        queue = GroupQueue(2, spare, 2, 0)
        queue.advance(0)
        hung = queue.ask(now=0.0)  # never returns
        asked = []
        while (episode := queue.ask(now=1.0)) is not None:
            asked.append(episode)
        for episode in asked:
            queue.put(episode, 1.0, now=2.0)
        assert len(queue.live[1].finished) == 2 + spare
        assert (queue.get() is not None) == bool(spare)
        assert queue.hung(now=9.0, timeout=5.0) == ([] if spare else [hung])


def test_filtered_groups_end_at_the_cap() -> None:
    queue = GroupQueue(2, drop=all_equal, staleness=0, most_filtered=3)
    queue.advance(0)
    for _ in range(4):
        assert queue.get() is None
        queue.put(queue.ask() or 0, 1.0)
        episode = next(iter(queue.live))
        queue.ask()
        queue.put(episode, 1.0)
    found = queue.get()
    assert queue.filtered == 3 and found is not None and found.rollouts == (1.0, 1.0)


def test_without_a_number_of_groups_one_is_created_when_asked() -> None:
    queue = GroupQueue(1, groups_per_step=None)
    queue.advance(0)
    assert not queue.live
    assert [queue.ask(), queue.ask()] == [0, 1]


def test_environments_that_have_ended_close_the_queue() -> None:
    queue = GroupQueue(2, drop=all_equal)
    queue.advance(0)
    for _ in range(2):
        queue.put(queue.ask() or 0, None)
    assert queue.closed and queue.ask() is None


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(ConfigError, match="`redundancy` is -1. It must be at least 0."):
        GroupQueue(2, redundancy=-1)
    queue = GroupQueue(2)
    with pytest.raises(MethodError, match="Call `advance"):
        queue.ask()
    queue.advance(3)
    with pytest.raises(MethodError, match="step 2 after step 3"):
        queue.advance(2)
