"""Calls of rollout programs: tools, environments and judges, each in a thread, with a time-out."""

from __future__ import annotations

import asyncio
import concurrent.futures
import inspect
import threading
import time
from collections.abc import Sequence
from typing import Any

from rl_plugins.errors import MethodError
from rl_plugins.requests import Call, Called

MAX_HANGING = 64
CONCURRENCY = 32  # calls at a time
_running: set[threading.Thread] = set()


def run_calls(calls: Sequence[Call]) -> list[Called]:
    """All results, in order. A call that raises or takes too long gives a `Called` with the error.

    Raises:
        MethodError: too many calls never returned.
    """
    results: list[Called] = []
    for first in range(0, len(calls), CONCURRENCY):
        wave = [(call, start_call(call)) for call in calls[first : first + CONCURRENCY]]
        done = {id(f): f for f in _wait([(f, call.timeout) for call, f in wave])}
        results += [done[id(f)].result() if id(f) in done else _late(call) for call, f in wave]
    return results


async def run_call(call: Call) -> Called:
    """One call from a coroutine, which is not blocked."""
    future = asyncio.wrap_future(start_call(call))
    done, _ = await asyncio.wait({future}, timeout=call.timeout)
    return future.result() if done else _late(call)


def start_call(call: Call) -> concurrent.futures.Future[Called]:
    """Starts a call in a daemon thread that nobody joins."""
    if len(_running) >= MAX_HANGING + CONCURRENCY:
        raise MethodError(
            f"{len(_running)} calls of rollout programs (the last: {call.name}) never returned and still hold a thread "
            f"each. A tool must end by itself: run what may hang in a process of its own that is killed."
        )
    future: concurrent.futures.Future[Called] = concurrent.futures.Future()
    future.set_running_or_notify_cancel()

    def run() -> None:
        try:
            result: Any = call.function(*call.args)
            if inspect.isawaitable(result):
                result = asyncio.run(_awaited(result))
            called = Called(result)
        except BaseException as e:  # SystemExit of a tool must not end the thread without an answer
            called = Called(error=f"{type(e).__name__}: {e}")
        _running.discard(thread)
        future.set_result(called)

    thread = threading.Thread(target=run, name=f"rl_plugins {call.name}", daemon=True)
    _running.add(thread)
    thread.start()
    return future


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
