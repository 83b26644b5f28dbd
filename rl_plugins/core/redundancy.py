"""Redundant rollouts: more of them begin than are kept, and the others are closed when enough have ended.

    class MyAgent(Method):
        brings = {"redundancy"}

        def rollout(self, prompt):
            return (yield from independent(prompt, lambda k: self.one(prompt)))

A plan says how many (`PlanRow.redundant`; the method `rollart_redundancy` sets it), and `independent` does it for
rollout programs. Groups of `admit` do the same (`rl_plugins.runtime.carry_over`). Every row that is kept says in `meta`
what became of the others of its prompt, under the name `NOTE`.

Short rollouts end earlier, so they are kept more often.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

from rl_plugins.core.requests import Generate, Prompt, Some, Trajectory, together

T = TypeVar("T")

NOTE = "redundancy"
FIELDS = ("closed", "failed", "kept_turns", "kept_tokens", "closed_turns", "closed_tokens")
"""What a note says: rollouts of the prompt that were closed before their end, and that failed; mean numbers of
generations and tokens of those that are kept, and of those that were closed, NaN where there are none."""


def independent(prompt: Prompt, one: Callable[[int], Generator[Any, Any, T | None]]) -> Generator[Any, Any, list[T]]:
    """The rollouts of a prompt, each by a program of its own that does not look at the others.

    `prompt.n` of them are returned, in the order of their numbers. Where the plan asks for redundant ones,
    `prompt.n + prompt.redundant` begin. The first `prompt.n` to end are kept. The others are closed: their `finally`
    blocks run, and they become no row.

    A rollout whose `meta` has an `error` (a broken environment) does not count as ended while others may still take its
    place. It is kept where too few others end.

    Args:
        one: number -> the program of that rollout. Its result is a trajectory, or a list of them where a rollout is
            several rows. None: it failed, and is left out.
    """
    if not prompt.redundant:
        made = yield from together([one(k) for k in range(prompt.n)])
        return [rows for rows in made if rows is not None]
    runs = [_Run(one(k)) for k in range(prompt.n + prompt.redundant)]
    yield from together([run.program() for run in runs], first=prompt.n)
    whole = [run for run in runs if run.ended and not run.failed]
    broken = [run for run in runs if run.failed and run.result is not None]
    kept = [*whole, *broken[: prompt.n - len(whole)]]
    closed = [run for run in runs if not run.ended]
    told = note(
        [(run.turns, run.tokens) for run in kept],
        [(run.turns, run.tokens) for run in closed],
        sum(run.failed for run in runs),
    )
    return [_noted(run.result, told) for run in runs if run in kept]


def note(
    kept: Sequence[tuple[int, int]], closed: Sequence[tuple[int, int]], failed: int = 0
) -> dict[str, dict[str, float]]:
    """The `meta` of every row that is kept.

    Args:
        kept, closed: generations and tokens of each such rollout.
        failed: number of rollouts that failed.
    """

    def means(of: Sequence[tuple[int, int]]) -> list[float]:
        return [sum(column) / len(of) for column in zip(*of, strict=True)] if of else [math.nan, math.nan]

    values = (len(closed), failed, *means(kept), *means(closed))
    return {NOTE: dict(zip(FIELDS, map(float, values), strict=True))}


class _Run:
    """One of several programs, and what it did so far.

    Attributes:
        ended, failed: it returned something; None, or a rollout with an error.
        result: what it returned.
        tokens: that it got. What is under way when it is closed is not known.
    """

    def __init__(self, inner: Generator[Any, Any, Any]) -> None:
        self._inner = inner
        self.ended = self.failed = False
        self.result: Any = None
        self.tokens = self._answered = self._open = 0

    @property
    def turns(self) -> int:
        """Generations that it asked for."""
        return self._answered + self._open

    def program(self) -> Generator[Any, Any, bool | None]:
        """The program. Its result is None if it failed."""
        answer: Any = None
        try:
            while True:
                try:
                    asked = self._inner.send(answer)
                except StopIteration as done:
                    self.ended, self.result = True, done.value
                    self.failed = done.value is None or any(row.meta.get("error") for row in _rows(done.value))
                    return None if self.failed else True
                requests = asked if isinstance(asked, list) else [asked]
                self._open = sum(isinstance(request, Generate) for request in requests)
                answer = yield asked
                if isinstance(answer, Some):
                    results = [answer.get(key) for key in asked.keys]
                else:
                    results = answer if isinstance(asked, list) else [answer]
                self._open = 0
                for request, result in zip(requests, results, strict=True):
                    if isinstance(request, Generate) and result is not None:
                        self._answered += 1
                        self.tokens += sum(len(made.tokens) for made in result)
        finally:
            self._inner.close()


def _rows(rollout: Any) -> list[Trajectory]:
    rows = rollout if isinstance(rollout, list | tuple) else [rollout]
    return [row for row in rows if isinstance(row, Trajectory)]


def _noted(rollout: Any, told: dict[str, Any]) -> Any:
    """With a note on every row. What is no rollout is left to who checks the program."""
    if isinstance(rollout, Trajectory):
        return rollout.noted(**told)
    rows = _rows(rollout)
    return [row.noted(**told) for row in rows] if len(rows) == len(rollout) else rollout
