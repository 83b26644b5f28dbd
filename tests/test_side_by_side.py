"""`together` on an asynchronous engine: each rollout goes on alone, with the rows of the lockstep; the first n win."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.requests import Call, Generate, Score, Trajectory, together
from rl_plugins.kit.agents import Observation, play
from rl_plugins.runtime.programs import Running, drive
from rl_plugins.testing.engine import CharChat, TableEngine, make_prompt, run_program

TABLE = {
    "a": {"a": 0.5, "b": 0.3, "<eos>": 0.2},
    "b": {"a": 0.6, "<eos>": 0.4},
    "<eos>": {"a": 0.7, "b": 0.3},
    "": {"a": 1.0},
}


def program(body: Any) -> Method:
    class Own(Method):
        name = "own"

        def rollout(self, prompt: Any) -> Any:
            return body(prompt)

    return Own()


class Slow:
    """A fake engine whose requests take a time of their own each."""

    def __init__(self, delays: Any = lambda: 0.0) -> None:
        self.engine = TableEngine(TABLE, reward=lambda text, columns: len(text))
        self.delays, self.cancelled = delays, 0

    async def generate(self, prompt: Any, request: Generate) -> Any:
        made = self.engine.generate([(prompt, request)])[0]
        try:
            await asyncio.sleep(self.delays())
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        return made

    async def score(self, prompt: Any, trajectory: Trajectory) -> Any:
        await asyncio.sleep(self.delays())
        return self.engine.score([(prompt, trajectory)])[0]


def alone(body: Any, n: int = 3, engine: Slow | None = None) -> Any:
    prompt = make_prompt(CharChat(), "hi", n=n)
    return asyncio.run(asyncio.wait_for(drive(Running(program(body), prompt), engine or Slow()), 20))


def test_a_fast_rollout_ends_while_the_first_turn_of_a_slow_one_waits() -> None:
    ended = threading.Event()

    def fast(prompt: Any) -> Any:
        t = prompt.start()
        for _ in range(5):
            (made,) = yield Generate(t, max_tokens=1)
            t = t.add(made)
            assert not (yield Call(time.sleep, (0.001,))).error
        ended.set()
        return t

    def slow(prompt: Any) -> Any:
        called = yield Call(ended.wait, (10,), timeout=15)
        (made,) = yield Generate(prompt.start(), max_tokens=2)
        return prompt.start().add(made).noted(waited=called.value)

    def body(prompt: Any) -> Any:
        return (yield from together([slow(prompt), together_of_one(fast(prompt))]))

    def together_of_one(inner: Any) -> Any:  # nested: the inner one goes on alone too
        return (yield from together([inner]))[0]

    (first,), (second,) = alone(body)
    assert first.meta["waited"] is True and len(first) <= 2 < len(second)


PLANS = st.lists(st.lists(st.sampled_from(["one", "many", "call", "score", "none", "nest"]), max_size=4), max_size=4)


def body_of(plans: list[list[str]]) -> Any:
    def one(prompt: Any, k: int, plan: list[str], depth: int = 0) -> Any:
        t = prompt.start().observe((97 + k, 97 + depth))  # contexts of their own: samples depend on nothing else
        for step in plan:
            if step == "one":
                (made,) = yield Generate(t, max_tokens=2)
                t = t.add(made)
            elif step == "many":
                left, called, right = yield [Generate(t, max_tokens=1), Call(str, (k,)), Generate(t, max_tokens=3)]
                assert called.value == str(k)
                t = t.add(left[0]) if len(left[0].tokens) else t.add(right[0])
            elif step == "call":
                assert (yield Call(lambda x: x + 1, (k,))).value == k + 1
            elif step == "score":
                t = t.scored((yield Score(t)))
            elif step == "none":
                assert (yield []) == []
            elif depth < 2:
                inner = [one(prompt, 2 * k + i, ["one", "many", "nest"], depth + 1) for i in range(2)]
                grown = yield from together(inner)
                t = t.noted(inner=[list(x.tokens) for x in grown])
        return t

    def body(prompt: Any) -> Any:
        return (yield from together([one(prompt, k, plan) for k, plan in enumerate(plans)]))

    return body


@settings(max_examples=40, deadline=None)
@given(PLANS, st.randoms(use_true_random=False))
def test_rows_and_their_order_are_those_of_the_lockstep(plans: list[list[str]], random: Any) -> None:
    engine = Slow(lambda: random.choice([0, 0, 0.0005, 0.001]))
    found = alone(body_of(plans), len(plans) or 1, engine)
    wanted = run_program(program(body_of(plans)), make_prompt(CharChat(), "hi", n=len(plans) or 1), Slow().engine)
    assert found == wanted
    assert [r.meta for (r,) in found] == [r.meta for (r,) in wanted]


def test_the_first_to_end_are_kept_in_order_and_the_others_are_closed() -> None:
    closed: list[int] = []

    def one(prompt: Any, k: int, turns: int) -> Any:
        t = prompt.start().observe((97 + k,))
        try:
            for _ in range(turns):
                (made,) = yield Generate(t, max_tokens=1)
                t = t.add(made)
            return t.noted(k=k)
        finally:
            closed.append(k)

    def body(prompt: Any) -> Any:
        rows = yield from together([one(prompt, k, turns) for k, turns in enumerate([9, 2, 1, 9, 3])], first=prompt.n)
        assert sorted(closed) == [0, 1, 2, 3, 4]
        return rows

    for run in (
        lambda: alone(body),
        lambda: run_program(program(body), make_prompt(CharChat(), "hi", n=3), Slow().engine),
    ):
        closed.clear()
        assert [row.meta["k"] for (row,) in run()] == [1, 2, 4]
        assert closed == [2, 1, 4, 0, 3]


def test_requests_of_closed_rollouts_are_cancelled_and_do_not_answer_later_ones() -> None:
    delays = iter([5.0, 0.0, 0.0, 0.0])
    engine = Slow(lambda: next(delays))

    def one(prompt: Any, k: int) -> Any:
        (made,) = yield Generate(prompt.start().observe((97 + k,)), max_tokens=1)
        return prompt.start().observe((97 + k,)).add(made)

    def body(prompt: Any) -> Any:
        (a,) = yield from together([one(prompt, 0), one(prompt, 1)], first=1)
        b, c = yield from together([one(prompt, 2), one(prompt, 3)])
        return [a, b, c]

    start = time.monotonic()
    rows = alone(body, 3, engine)
    assert [row.tokens[0] - 97 for (row,) in rows] == [1, 2, 3]
    assert time.monotonic() - start < 4 and engine.cancelled == 1


class World:
    """Ends after `turns`; turn `hang` never returns."""

    open_now = 0

    def __init__(self, turns: int, leave: threading.Event | None = None) -> None:
        self.turns, self.leave = turns, leave
        World.open_now += 1

    def reset(self, columns: Any) -> Observation:
        return Observation("go")

    def act(self, action: str) -> Observation:
        if self.leave is not None:
            self.leave.wait(30)
        self.turns -= 1
        return Observation("on", reward=1.0, done=not self.turns)

    def close(self) -> None:
        World.open_now -= 1


def test_an_environment_that_never_returns_costs_its_own_rollout_only() -> None:
    leave = threading.Event()

    def body(first: int | None, timeout: float) -> Any:
        worlds = [lambda: World(3), lambda: World(9, leave), lambda: World(2)]

        def run(prompt: Any) -> Any:
            return (
                yield from together([play(prompt, make, 9, timeout, turn_tokens=1) for make in worlds], first=first)
            )

        return run

    try:
        rows = alone(body(None, 0.2))
        assert [row.meta["turns"] for (row,) in rows] == [3, 1, 2]
        assert ["TimeoutError" in row.meta["error"] for (row,) in rows] == [False, True, False]
        start = time.monotonic()
        rows = alone(body(2, 20.0), 2)
        assert [row.meta["turns"] for (row,) in rows] == [3, 2] and time.monotonic() - start < 10
        assert World.open_now == 0
    finally:
        leave.set()


def test_an_engine_that_fails_once_ends_all() -> None:
    class Fails(Slow):
        async def generate(self, prompt: Any, request: Generate) -> Any:
            if request.max_tokens == 7:
                raise RuntimeError("the engine died")
            return await super().generate(prompt, request)

    closed: list[int] = []

    def one(prompt: Any, limit: int) -> Any:
        try:
            yield Generate(prompt.start(), max_tokens=limit)
        finally:
            closed.append(limit)
        return prompt.start()

    def body(prompt: Any) -> Any:
        return (yield from together([one(prompt, 1), one(prompt, 7)]))

    engine = Fails(lambda: 5.0)
    with pytest.raises(RuntimeError, match="the engine died"):
        alone(body, 2, engine)
    assert closed == [1, 7] and engine.cancelled == 1


@pytest.mark.parametrize("first", [-1, 3])
def test_a_wrong_number_is_refused(first: int) -> None:
    def body(prompt: Any) -> Any:
        return (yield from together([iter(()), iter(())], first=first))

    with pytest.raises(MethodError, match="must be between 0 and 2, its programs"):
        alone(body)


def test_a_rollout_that_failed_is_none_of_the_first() -> None:
    def one(prompt: Any, k: int, turns: int, fails: bool) -> Any:
        t = prompt.start().observe((97 + k,))
        for _ in range(turns):
            yield Generate(t, max_tokens=1)
        return None if fails else t.noted(k=k)

    def body(plan: list[tuple[int, bool]], first: int | None) -> Any:
        return lambda prompt: together([one(prompt, k, *p) for k, p in enumerate(plan)], first=first)

    assert [r.meta["k"] for (r,) in alone(body([(1, True), (5, False), (2, False), (3, False)], 2))] == [2, 3]
    assert [r.meta["k"] for (r,) in alone(body([(1, True), (5, False)], 2))] == [1]


def test_none_is_first() -> None:
    def body(prompt: Any) -> Any:
        assert (yield from together([play(prompt, lambda: World(1), 1)], first=0)) == []
        return []

    assert alone(body) == []
