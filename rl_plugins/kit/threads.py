"""Calls that may hang, of rollout programs and of services, each in a daemon thread that nobody joins.

One that never returns costs its time-out and no more, until too many of them hold a thread.
"""

from __future__ import annotations

import asyncio
import atexit
import concurrent.futures
import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from weakref import WeakKeyDictionary

from rl_plugins.core.errors import MethodError, shortened
from rl_plugins.core.requests import Call, Called

LONGEST_ERROR = 500  # characters of what an exception says
MAX_HANGING = 64  # calls of one `Threads` that never returned; each holds a thread until the process ends


class Threads:
    """Threads for calls of one kind.

    Args:
        what: how messages name them: "calls of rollout programs".
        concurrency: calls at a time; those beyond it that still run have never returned.
        advice: how to fix calls that never return.
    """

    def __init__(self, what: str, concurrency: int, advice: str) -> None:
        self.what, self.concurrency, self.advice = what, concurrency, advice
        self._running: set[threading.Thread] = set()

    def check(self, beyond: int = 0, last: str = "") -> None:
        """Raises MethodError if too many calls never returned.

        Args:
            beyond: calls that may be running rightly.
        """
        if len(self._running) >= MAX_HANGING + beyond:
            raise MethodError(
                f"{len(self._running)} {self.what}{last} never returned and still hold a thread each. {self.advice}"
            )

    def start(self, function: Callable[[], Any], name: str) -> concurrent.futures.Future[Any]:
        """Calls a function in a thread of its own. The future never holds an exit or a StopIteration, which would end
        what waits for it, but a RuntimeError that tells of it.

        Raises:
            MethodError: too many earlier calls never returned.
        """
        self.check(self.concurrency, f" (the last: {name})")
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        future.set_running_or_notify_cancel()  # from here on nobody can cancel it

        def run() -> None:
            result, error = None, None
            try:
                result = function()
            except BaseException as e:  # an exit, too: who waits for the future would wait forever
                ordinary = isinstance(e, Exception) and not isinstance(e, StopIteration)
                error = e if ordinary else RuntimeError(f"{type(e).__name__}: {shortened(e, LONGEST_ERROR)}")
            self._running.discard(thread)
            if error is None:
                future.set_result(result)
            else:
                future.set_exception(error)

        thread = threading.Thread(target=run, name=f"rl_plugins {name}", daemon=True)
        self._running.add(thread)
        thread.start()
        return future


_calls = Threads(
    "calls of rollout programs",
    32,
    "A tool must end by itself: run what may hang in a process of its own that is killed.",
)


def run_calls(calls: Sequence[Call]) -> list[Called]:
    """All results, in order. A call that raises or takes too long gives a `Called` with the error.

    Raises:
        MethodError: too many calls never returned.
    """
    results: list[Called] = []
    for first in range(0, len(calls), _calls.concurrency):
        wave = [(call, start_call(call)) for call in calls[first : first + _calls.concurrency]]
        done = {id(f): f for f in _wait([(f, call.timeout) for call, f in wave])}
        results += [done[id(f)].result() if id(f) in done else _late(call) for call, f in wave]
    return results


_at_a_time: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()


async def run_call(call: Call) -> Called:
    """One call from a coroutine, which is not blocked. The others of its event loop wait where too many go at a time;
    the time limit runs from the start of the call."""
    async with _at_a_time.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(_calls.concurrency)):
        future = asyncio.wrap_future(start_call(call))
        done, _ = await asyncio.wait({future}, timeout=call.timeout)
    return future.result() if done else _late(call)


_left: list[tuple[concurrent.futures.Future[Called], float]] = []  # calls nobody waits for, and their time limits


def leave_call(call: Call) -> None:
    """Starts a call from where nobody can wait for it, because a program is being closed. `await_left` does later."""
    if len(_left) >= _calls.concurrency:
        await_left()
    with contextlib.suppress(MethodError):  # too many hang: the next call of a program says so
        _left.append((start_call(call), call.timeout))


@atexit.register
def await_left() -> None:
    """Waits for the calls of `leave_call`, for all at the same time, each within its time limit."""
    left, _left[:] = list(_left), []
    _wait(left)


def start_call(call: Call) -> concurrent.futures.Future[Called]:
    """Starts a call; its future never holds an error."""

    def called() -> Called:
        try:
            return Called(answer_of(call.function, *call.args))
        except BaseException as e:  # SystemExit of a tool must not end the thread without an answer
            return Called(error=f"{type(e).__name__}: {shortened(e, LONGEST_ERROR)}")

    return _calls.start(called, call.name)


def answer_of(function: Callable[..., Any], *args: Any) -> Any:
    """What a function or a coroutine function answers."""
    result = function(*args)
    return finished(_awaited(result)) if inspect.isawaitable(result) else result


async def _awaited(value: Any) -> Any:
    return await value


def _wait(pairs: list[tuple[concurrent.futures.Future[Called], float]]) -> list[concurrent.futures.Future[Called]]:
    """Those that are done within their time, which runs from now."""
    start, finished = time.monotonic(), []
    for future, timeout in sorted(pairs, key=lambda p: p[1]):
        left = max(0.0, start + timeout - time.monotonic())
        concurrent.futures.wait([future], left)
        if future.done():
            finished.append(future)
    return finished


def _late(call: Call) -> Called:
    return Called(error=f"TimeoutError: {call.name} took longer than {call.timeout:g} s")


def finished(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine to its end; in a thread of its own where an event loop is running already (a notebook)."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(coroutine)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, coroutine).result()
