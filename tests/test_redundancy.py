"""Redundant rollouts: the first to end are kept, the others are closed, and rows say what became of them. Programs on
the fake engines, and groups that wait, without a host."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_side_by_side import Slow, World, program
from test_turn_limits import AGENTS

from rl_plugins.core.errors import MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.redundancy import FIELDS, NOTE, independent, note
from rl_plugins.core.requests import Call, Generate, Trajectory, together
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.kit.agents import play
from rl_plugins.methods.ui_s1_rollout import UiS1Rollout
from rl_plugins.runtime import resume
from rl_plugins.runtime.carry_over import Group, from_plain, to_plain, without_redundant
from rl_plugins.runtime.programs import Running, drive
from rl_plugins.testing import check_method
from rl_plugins.testing.engine import EOS, CharChat, TableEngine, make_prompt, run_program

HOSTS = ["lockstep", "alone"]


def played(body: Any, n: int, redundant: int, host: str, delays: Any = lambda: 0.0) -> list[Any]:
    """Rollouts of a program, on the engine of TRL or on that of verl."""
    prompt = make_prompt(CharChat(), "hi", n=n, redundant=redundant)
    if host == "lockstep":
        return list(run_program(program(body), prompt, Slow().engine))
    return asyncio.run(asyncio.wait_for(drive(Running(program(body), prompt), Slow(delays)), 20))


def turns_of(prompt: Any, k: int, turns: int, closed: list[int], **meta: Any) -> Any:
    """A rollout that generates one token in every turn."""
    t = prompt.start().observe((97 + k,))
    try:
        for _ in range(turns):
            (made,) = yield Generate(t, max_tokens=1)
            t = t.add(made)
        return None if meta.get("gone") else t.noted(k=k, **meta)
    finally:
        closed.append(k)


@pytest.mark.parametrize("host", HOSTS)
def test_without_redundancy_it_is_together(host: str) -> None:
    def one(make: Any) -> Any:
        def body(prompt: Any) -> Any:
            return make(prompt, lambda k: turns_of(prompt, k, 3 - k, []))

        return body

    ours = played(one(independent), 3, 0, host)
    wanted = played(one(lambda prompt, make: together([make(k) for k in range(prompt.n)])), 3, 0, host)
    assert ours == wanted and [r.meta for (r,) in ours] == [{"k": 0}, {"k": 1}, {"k": 2}]


@pytest.mark.parametrize("host", HOSTS)
def test_the_first_to_end_are_kept_and_say_what_was_closed(host: str) -> None:
    closed: list[int] = []
    turns, alive = [9, 2, 1, 9, 3], []  # references keep the programs from being closed as garbage

    def one(prompt: Any, k: int) -> Any:
        alive.append(turns_of(prompt, k, turns[k], closed))
        return alive[-1]

    rows = played(lambda p: independent(p, lambda k: one(p, k)), 3, 2, host)
    assert [row.meta["k"] for (row,) in rows] == [1, 2, 4] and sorted(closed) == [0, 1, 2, 3, 4]
    for (row,) in rows:
        told = row.meta[NOTE]
        assert list(told) == list(FIELDS)
        assert (told["closed"], told["failed"], told["kept_turns"]) == (2.0, 0.0, 2.0)
        # the third turn of rollout 4 was its last; those closed had asked for three or four generations by then
        assert 3 <= told["closed_turns"] <= 4 and told["kept_tokens"] == 2.0
        assert told["closed_turns"] - 1 <= told["closed_tokens"] <= told["closed_turns"]


PLANS = st.lists(
    st.tuples(st.integers(0, 4), st.sampled_from(["ends", "ends", "error", "gone"])), min_size=1, max_size=7
)


@settings(max_examples=40, deadline=None)
@given(PLANS, st.integers(1, 4))
def test_what_is_kept_in_lockstep_equals_a_loop(plan: list[tuple[int, str]], n: int) -> None:
    n = min(n, len(plan))
    ends: list[int] = []

    def one(prompt: Any, k: int) -> Any:
        turns, how = plan[k]
        return turns_of(prompt, k, turns, ends, error="broke" if how == "error" else "", gone=how == "gone")

    rows = played(lambda p: independent(p, lambda k: one(p, k)), n, len(plan) - n, "lockstep")
    order = sorted(range(len(plan)), key=lambda k: (plan[k][0], k))
    good = [k for k in order if plan[k][1] == "ends"][:n]
    wanted = sorted(good + sorted(k for k in order if plan[k][1] == "error")[: n - len(good)])
    if len(plan) == n:  # nothing is redundant: all that is there is returned
        wanted = [k for k in range(n) if plan[k][1] != "gone"]
    assert [row.meta["k"] for (row,) in rows] == wanted
    assert len(set(ends)) == len(ends), "closed once"
    for (row,) in rows if len(plan) > n else ():
        told = row.meta[NOTE]
        assert told["kept_turns"] == pytest.approx(sum(plan[k][0] for k in wanted) / len(wanted))
        last = max((plan[k][0], k) for k in good) if len(good) == n else (9, 0)
        closed = [k for k in order if (plan[k][0], k) > last]
        assert told["closed"] == len(closed)
        assert told["failed"] == sum(plan[k][1] != "ends" for k in order if k not in closed)
        assert math.isnan(told["closed_turns"]) == (not closed)


@pytest.mark.parametrize("host", HOSTS)
def test_another_rollout_takes_the_place_of_a_broken_environment(host: str) -> None:
    leave = threading.Event()

    worlds = [(3, None), (9, leave), (2, None), (5, None)]

    def body(prompt: Any) -> Any:
        def one(k: int) -> Any:
            return play(prompt, lambda: World(*worlds[k]), 9, 0.2, turn_tokens=1)

        return (yield from independent(prompt, one))

    open_before = World.open_now
    try:
        rows = played(body, 3, 0, host)
        assert [bool(row.meta["error"]) for (row,) in rows] == [False, True, False], "it costs its own rollout"
        rows = played(body, 3, 1, host)
        assert [(row.meta["turns"], row.meta["error"]) for (row,) in rows] == [(3, ""), (2, ""), (5, "")]
        told = rows[0][0].meta[NOTE]  # alone, the third rollout ends before the time-out
        assert (told["failed"], told["closed"]) == ((1.0, 0.0) if host == "lockstep" else (0.0, 1.0))
        assert World.open_now == open_before, "all are closed"
    finally:
        leave.set()


def test_nobody_waits_for_an_environment_that_never_returns() -> None:
    """On an asynchronous engine: its time-out is 30 s."""
    leave = threading.Event()
    worlds = [(3, None), (9, leave), (2, None)]

    def body(prompt: Any) -> Any:
        def one(k: int) -> Any:
            return play(prompt, lambda: World(*worlds[k]), 9, 30.0, turn_tokens=1)

        return (yield from independent(prompt, one))

    open_before = World.open_now
    try:
        start = time.monotonic()
        rows = played(body, 2, 1, "alone")
        assert [row.meta["turns"] for (row,) in rows] == [3, 2] and time.monotonic() - start < 10
        assert World.open_now == open_before
        assert {k: rows[0][0].meta[NOTE][k] for k in ("closed", "closed_turns")} == {"closed": 1.0, "closed_turns": 1.0}
    finally:
        leave.set()


@pytest.mark.parametrize("host", HOSTS)
def test_nested_programs_and_lists_of_requests_are_counted(host: str) -> None:
    def leaf(t: Trajectory, turns: int) -> Any:
        for _ in range(turns):
            made = yield [Generate(t, n=2, max_tokens=1), Call(int, ("3",))]
            t = t.add(made[0][0])
        return t

    def one(prompt: Any, k: int) -> Any:
        start = prompt.start().observe((97 + k,))
        first, second = yield from together([leaf(start, 1), leaf(start, 2 + 3 * k)])
        return [first.noted(k=k), second.noted(k=k)]

    class Pairs(Method):
        name = "pairs"
        rows_per_rollout = 2

        def rollout(self, prompt: Any) -> Any:
            return (yield from independent(prompt, lambda k: one(prompt, k)))

    prompt = make_prompt(CharChat(), "hi", n=1, redundant=1)
    if host == "lockstep":
        rows = run_program(Pairs(), prompt, Slow().engine)
    else:
        rows = asyncio.run(drive(Running(Pairs(), prompt), Slow()))
    ((a, b),) = rows
    assert a.meta == b.meta and a.meta["k"] == 0
    told = a.meta[NOTE]
    assert told["kept_turns"] == 3.0 and told["kept_tokens"] == 6.0 and told["closed"] == 1.0


@pytest.mark.parametrize("name", [n for n in AGENTS if n != "aepo_rollout" and n != "play"])
def test_methods_that_play_agents_close_the_slow_ones(name: str) -> None:
    """The policy answers with a letter, and ends by itself sooner or later."""
    engine = TableEngine(lambda text: {EOS: 1.0} if text[-1] == "a" else {"a": 1.0})
    method = AGENTS[name][0]()
    assert "redundancy" in method.brings
    prompt = make_prompt(engine.chat, "task", n=3, max_tokens=4000, redundant=2)
    rollouts = run_program(method, prompt, engine)
    assert len(rollouts) == 3 and all(row.meta[NOTE]["closed"] == 2.0 for rows in rollouts for row in rows)
    again = run_program(AGENTS[name][0](), replace(prompt, redundant=0), engine)
    assert len(again) == 3 and not any(NOTE in row.meta for rows in again for row in rows)


def test_every_method_that_says_so_is_looked_at() -> None:
    """The contract test looks at each by existing; the kit has no recorded turns for one."""
    assert "redundancy" in UiS1Rollout.brings and "redundancy" not in AGENTS["aepo_rollout"][0]().brings


def test_a_program_that_only_says_so_breaks_the_contract() -> None:
    class Claims(Method):
        """Plays nothing.

        Symbols: none.
        """

        name = "claims"
        brings = {"redundancy"}

        def rollout(self, prompt: Any) -> Any:
            made = yield Generate(prompt.start(), n=prompt.n)
            return [prompt.start().add(g) for g in made]

    with pytest.raises(AssertionError, match="of 2 redundant rollouts of a prompt its rows tell nothing"):
        check_method(Claims)


def test_what_is_no_rollout_is_told_as_without_redundancy() -> None:
    def nonsense(prompt: Any, k: int) -> Any:
        yield Generate(prompt.start(), max_tokens=1)
        return ["x"]

    for redundant in (0, 1):
        with pytest.raises(MethodError, match="returned str instead of a trajectory"):
            played(lambda p: independent(p, lambda k: nonsense(p, k)), 1, redundant, "lockstep")


# ---- groups that wait


def row(tokens: int, finish: str) -> Trajectory:
    return Trajectory((1,), range(tokens), (1,) * tokens, (-1.0,) * tokens, (0,) * tokens, finish)  # type: ignore[arg-type]


ENDS = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=1, max_size=6)


@given(ENDS, st.integers(0, 5))
def test_a_group_keeps_the_rollouts_that_ended_first(ends: list[tuple[int, bool]], redundant: int) -> None:
    redundant = min(redundant, len(ends) - 1)
    group = Group(
        PlanRow(3, 0, len(ends) - redundant, redundant=redundant),
        drawn=0,
        rollouts=tuple(row(10 * i, "eos" if done else "abort") for i, (_, done) in enumerate(ends)),
    )
    enough = len(ends) - redundant
    assert (group.size, group.enough) == (len(ends), enough)
    assert group.complete == (sum(done for _, done in ends) >= enough)
    if not group.complete:
        return
    ticks = [tick for tick, _ in ends]
    after, last = without_redundant(group, ticks)
    left = sorted((tick, i) for i, (tick, done) in enumerate(ends) if done)[:enough]
    assert [len(t) // 10 for t in after.rollouts] == sorted(i for _, i in left) and last == left[-1][0]
    assert after.complete and after.size == enough and after.row.redundant == 0
    if not redundant:
        assert after == group
        return
    kept = [10 * i for _, i in left]
    closed = [10 * i for i in range(len(ends)) if 10 * i not in kept]
    wanted = note([(1, n) for n in kept], [(1, n) for n in closed])
    assert [t.meta for t in after.rollouts] == [wanted] * enough
    assert wanted[NOTE]["kept_tokens"] == pytest.approx(sum(kept) / enough)


def test_a_waiting_group_is_saved_with_its_redundancy_and_older_ones_are_read() -> None:
    group = Group(PlanRow(3, 0, 2, redundant=1), 4, (row(2, "eos").noted(a=1), row(1, "abort"), row(0, "")))
    saved = to_plain(group)
    assert from_plain(saved) == group and [t.meta for t in from_plain(saved).rollouts] == [{"a": 1}, {}, {}]
    assert resume._group_problem(saved) is None
    older = {**saved, "row": {k: v for k, v in saved["row"].items() if k != "redundant"}}
    older["rollouts"] = [{k: v for k, v in t.items() if k != "meta"} for t in saved["rollouts"]]
    assert resume._group_problem(older) is None and from_plain(older).row.redundant == 0
    assert "`meta` of a rollout" in str(
        resume._group_problem({**saved, "rollouts": [{**saved["rollouts"][0], "meta": 3}]})
    )
    assert "`row.redundant`" in str(resume._group_problem({**saved, "row": {**saved["row"], "redundant": "1"}}))
