"""Waiting that does not depend on the speed of the machine: for what must happen, and calls that hang until released.

A test states what happened (how often, in which order, while what was still hanging), never how many seconds it took.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

NEVER = 900.0  # seconds after which something that hangs is given up; nothing in the tests takes that long
HANG = 300.0  # seconds after which a call that hangs returns, so that a test that waits for it fails
SOON = 2.0  # a time-out for calls that hang, beside calls that must be in time and take about a millisecond


def until(condition: Callable[[], Any], what: str = "") -> Any:
    """Waits until the condition is true and returns what it gave."""
    end = time.monotonic() + NEVER
    while not (found := condition()):
        assert time.monotonic() < end, f"{what or 'the condition'} did not come true"
        time.sleep(0.01)
    return found


class Stuck:
    """A function that does not return until `release`. "Nobody waited for it" is: it still waits.

    Attributes:
        calls: how often it was called. waiting: calls that have not returned.
    """

    def __init__(self) -> None:
        self.calls = self.waiting = 0
        self._lock, self._end = threading.Lock(), threading.Event()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        with self._lock:
            self.calls += 1
            self.waiting += 1
        self._end.wait(HANG)
        with self._lock:
            self.waiting -= 1

    def release(self) -> None:
        self._end.set()
        until(lambda: not self.waiting, "the end of the calls that hung")
