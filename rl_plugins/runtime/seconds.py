"""What a step costs the process in this package: seconds on the wall and of its CPUs, by part, free of noise.

With `RL_PLUGINS_SECONDS=1` in the environment the hosts log of every step `rl_plugins/seconds` (the wall) and
`rl_plugins/cpu_seconds`, each with its parts behind it (`rl_plugins/seconds/driver`):

    driver    planning, the decision, the methods' hooks
    gather    rows and decisions between processes
    split     the decision, cut and applied
    programs  rollout programs and the provenance of their tokens
    update    `before_update` and the hooks in the loss, without their backward pass; on a GPU what it takes to launch

What a part spends inside the host's own functions is not counted, so `rl_plugins/seconds` next to the host's time of a
step is what a run without methods would not spend. Off by default: a time differs from run to run, and where reading
the clock of a process is slow (some sandboxes), it took 7 % of a run with agents.
"""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")
VARIABLE = "RL_PLUGINS_SECONDS"


class Seconds:
    """Clocks of one process. Parts contain each other, and a second belongs to the innermost one."""

    def __init__(self) -> None:
        self._spent: dict[str, tuple[float, float]] = {}
        self._open: list[str] = []  # "" for the host
        self._since = (0.0, 0.0)

    @property
    def on(self) -> bool:
        return os.environ.get(VARIABLE, "") not in ("", "0")

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Counts what runs inside as `name`; as nothing of ours if that is empty. Off, it reads no clock."""
        if not self.on:
            yield
            return
        self._book()
        self._open.append(name)
        try:
            yield
        finally:
            self._book()
            self._open.pop()

    def timed(self, name: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
        """A function whose calls are `part(name)`."""

        def wrap(function: Callable[P, T]) -> Callable[P, T]:
            @functools.wraps(function)
            def counted(*args: P.args, **kwargs: P.kwargs) -> T:
                with self.part(name):
                    return function(*args, **kwargs)

            return counted

        return wrap

    def take(self) -> dict[str, float]:
        """What was counted since the last time, by the name it is logged under; empty unless it is on. A part that was
        once counted is 0 when nothing was, so that means over steps add up."""
        spent, self._spent = self._spent, dict.fromkeys(self._spent, (0.0, 0.0))
        if not self.on or not spent:
            return {}
        found = {}
        for k, clock in enumerate(("seconds", "cpu_seconds")):
            found[f"rl_plugins/{clock}"] = sum(both[k] for both in spent.values())
            found |= {f"rl_plugins/{clock}/{name}": both[k] for name, both in spent.items()}
        return found

    @staticmethod
    def has(name: str) -> bool:
        """Whether a metric is one of these, which are another in every run."""
        return name.startswith(("rl_plugins/seconds", "rl_plugins/cpu_seconds"))

    def _book(self) -> None:
        now = time.perf_counter(), time.process_time()
        if self._open and self._open[-1]:
            wall, cpu = self._spent.get(self._open[-1], (0.0, 0.0))
            self._spent[self._open[-1]] = wall + now[0] - self._since[0], cpu + now[1] - self._since[1]
        self._since = now


SECONDS = Seconds()
"""Of this process."""
