"""The loop of an agent: whatever its environment does in any phase, the run goes on, and every rollout is a row."""

from __future__ import annotations

import asyncio
import itertools
import math
import threading
from collections import Counter
from typing import Any

import pytest
from waiting import NEVER, SOON, Stuck, until

from rl_plugins.core.requests import Call, Trajectory, together
from rl_plugins.kit import threads
from rl_plugins.kit.agents import Observation, Opened, play
from rl_plugins.kit.threads import await_left, leave_call, run_call
from rl_plugins.runtime import programs
from rl_plugins.runtime.registry import build, load
from rl_plugins.testing import check_method
from rl_plugins.testing.engine import EOS, TableEngine, make_prompt, run_program

METHODS = ["turn_control", "cleaner", "aepo_rollout", "rtv_pdr"]
PHASES = ["constructor", "reset", "act", "score", "close"]


class World:
    """Ends after two turns, with the score 1."""

    alive: Counter[str]

    def __init__(self) -> None:
        self.alive["made"] += 1

    def reset(self, columns: Any) -> Any:
        self.turn = 0
        return Observation("begin")

    def act(self, action: str) -> Any:
        self.turn += 1
        return Observation(f"n{self.turn}", done=self.turn == 2)

    def score(self) -> Any:
        return 1.0

    def close(self) -> Any:
        self.alive["closed"] += 1


def world(phase: str, what: Any, bad: Any = lambda number: True) -> Any:
    """A factory of environments, of which those with a bad number do `what` in one phase."""
    numbers, lock = itertools.count(), threading.Lock()
    alive: Counter[str] = Counter()

    def make() -> Any:
        with lock:
            number = next(numbers)
        if phase == "constructor" and bad(number):
            return what()
        changed = {phase: lambda self, *args: what()} if bad(number) else {}
        return type("World", (World,), {"alive": alive, **changed})()

    make.alive = alive  # type: ignore[attr-defined]
    return make


def played(name: str, environment: Any, n: int = 4, timeout: float = NEVER) -> list[Trajectory]:
    engine = TableEngine(lambda text: {EOS: 1.0} if text[-1] == "a" else {"a": 1.0})
    clock = "call_timeout" if name == "rtv_pdr" else "timeout"
    method = build(load(name), {"environment": environment, clock: timeout}, name)
    prompt = make_prompt(engine.chat, "go", n=n, max_tokens=90, reward_names=("r",))
    return [row for (row,) in run_program(method, prompt, engine)]


def raises() -> Any:
    raise KeyError("x")


def ends() -> Any:
    raise SystemExit(3)


async def coroutine_raises() -> Any:
    raise OSError("later")


FAULTS = {
    "raises": raises,
    "ends the process": ends,
    "answers None": lambda: None,
    "answers a text": lambda: "no such image",
    "answers bytes": lambda: b"\xff",
    "answers a number beyond all": lambda: math.inf,
    "answers another kind": lambda: {"text": "x"},
    "is a coroutine that raises": coroutine_raises,
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("name", METHODS)
def test_whatever_an_environment_does_every_rollout_is_a_row(name: str, phase: str, fault: str, caplog: Any) -> None:
    for bad, lost in ((lambda number: number == 1, 1), (lambda number: True, 4)):
        environment = world(phase, FAULTS[fault], bad)
        rows = played(name, environment)
        assert len(rows) == 4
        if phase == "close":
            lost = 0
            failed = "raises" in fault or fault == "ends the process"
            assert ("`close` of the environment World failed" in caplog.text) == (failed and name != "rtv_pdr")
        else:
            assert environment.alive["closed"] == environment.alive["made"]
        assert sum(math.isnan(row.meta["score"]) for row in rows) == lost
        for row in rows:
            unopened = phase in ("constructor", "reset") and math.isnan(row.meta["score"])
            assert (row.rewards is not None) == unopened == (len(row) == 0)  # it is not scored: nothing was done
            if math.isnan(row.meta["score"]) and (phase, fault) != ("score", "answers None"):
                assert row.meta["error"]


@pytest.mark.parametrize(
    ("name", "phase"),
    [*(("turn_control", phase) for phase in PHASES), *((name, "act") for name in METHODS[1:])],
)
def test_a_phase_that_hangs_costs_its_time_once_for_all_rollouts(name: str, phase: str, stuck: Stuck) -> None:
    rows = played(name, world(phase, stuck), n=4, timeout=SOON)
    assert len(rows) == 4 and stuck.waiting == stuck.calls == 4
    assert all(math.isnan(row.meta["score"]) == (phase != "close") for row in rows)


def test_chains_of_aepo_begin_at_once_where_no_environment_could_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one after the other: each may take its whole time."""
    waves: list[int] = []

    def counted(calls: list[Call]) -> Any:
        waves.append(sum("constructor" in call.name for call in calls))
        return threads.run_calls(calls)

    monkeypatch.setattr(programs, "run_calls", counted)
    assert len(played("aepo_rollout", world("constructor", raises), n=9)) == 9
    assert [n for n in waves if n] == [5, 4]


@pytest.mark.parametrize("name", METHODS)
def test_every_phase_may_be_a_coroutine_function(name: str) -> None:
    class Async(World):
        alive: Counter[str] = Counter()

        async def reset(self, columns: Any) -> Any:
            return super().reset(columns)

        async def act(self, action: str) -> Any:
            return super().act(action)

        async def score(self) -> Any:
            return super().score()

        async def close(self) -> Any:
            return super().close()

    async def make() -> Async:
        return Async()

    for environment in (Async, make):
        Async.alive.clear()
        rows = played(name, environment)
        assert [(row.meta["score"], row.meta["error"]) for row in rows] == [(1.0, "")] * 4
        assert Async.alive == {"made": 4, "closed": 4}


@pytest.mark.parametrize("value", [True, 2, "0.5", None, math.nan, [1.0]])
def test_what_a_score_may_be(value: Any) -> None:
    (row,) = played("turn_control", world("score", lambda: value), n=1)
    good = isinstance(value, (bool, int))
    assert row.meta["score"] == value if good else math.isnan(row.meta["score"])
    assert bool(row.meta["error"]) == (isinstance(value, (str, list)))


@pytest.mark.parametrize("reward", [None, math.nan, 1, "2.5", "much", [1, 2]])
def test_what_the_reward_of_an_observation_may_be(reward: Any) -> None:
    class Paid(World):
        alive: Counter[str] = Counter()

        def act(self, action: str) -> Any:
            return Observation("x", reward, done=True)

    (row,) = played("turn_control", Paid, n=1)
    assert bool(row.meta["error"]) == (reward in ("much", [1, 2]))
    (turn,) = row.turns
    assert turn.reward == float(reward) if reward in (1, "2.5") else math.isnan(turn.reward)


def test_an_environment_that_comes_too_late_is_closed() -> None:
    go_on, closed = threading.Event(), threading.Event()

    class Slow(World):
        alive: Counter[str] = Counter()

        def __init__(self) -> None:
            go_on.wait(NEVER)

        def close(self) -> None:
            closed.set()

    (row,) = played("turn_control", Slow, n=1, timeout=0.1)
    assert "took longer than" in row.meta["error"] and not closed.is_set()
    go_on.set()
    assert closed.wait(NEVER)


def test_closed_programs_close_their_environments_all_at_the_same_time(stuck: Stuck) -> None:
    """An engine that dies: 40 programs end, and each environment takes its time to close."""
    environment = world("close", stuck)
    engine = TableEngine(lambda text: {"a": 1.0}, fail_after=0)

    class Plain(load("turn_control")):  # type: ignore[misc]
        def rollout(self, prompt: Any) -> Any:
            return (yield from together([play(prompt, environment, 2, SOON) for _ in range(prompt.n)]))

    with pytest.raises(RuntimeError, match="the engine died"):
        run_program(
            Plain(build(load("turn_control"), {"environment": World}, "turn_control").params),
            make_prompt(engine.chat, "go", n=40),
            engine,
        )
    assert stuck.calls == stuck.waiting == 40


def test_a_call_that_is_left_is_waited_for_later_and_may_fail() -> None:
    begun, go_on, done = threading.Event(), threading.Event(), []

    def slow() -> None:
        begun.set()
        go_on.wait(NEVER)
        done.append(1)

    leave_call(Call(slow, timeout=NEVER))
    leave_call(Call(raises))
    assert begun.wait(NEVER) and not done
    go_on.set()
    await_left()
    assert done == [1]


def test_more_calls_than_may_hang_go_one_after_the_other_on_an_event_loop() -> None:
    """verl's agent loops serve each call as soon as it is asked for: 200 that are only slow are not 96 that hang."""
    most, now, lock = 0, 0, threading.Lock()

    def work() -> int:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        until(lambda: True)
        threading.Event().wait(0.01)
        with lock:
            now -= 1
        return 1

    async def all_of_them() -> list[Any]:
        return await asyncio.gather(*(run_call(Call(work, timeout=NEVER)) for _ in range(200)))

    assert [called.value for called in asyncio.run(all_of_them())] == [1] * 200
    assert 1 < most <= threads._calls.concurrency


def test_what_is_no_environment_is_not_kept() -> None:
    opened = Opened(SOON)
    for factory in (lambda: None, lambda: "no sandbox", lambda: object(), dict):
        with pytest.raises(ValueError, match="has no method"):
            opened.make(factory)
    assert opened._closing() == []


@pytest.mark.parametrize("phase", ["constructor", "reset", "act", "score"])
def test_check_refuses_an_environment_that_never_works(phase: str) -> None:
    with pytest.raises(AssertionError, match="every rollout ended with an error, .*KeyError: 'x'"):
        check_method(load("turn_control"), environment=world(phase, raises), limit=2)
