"""Runs rollout programs on an engine: what every adapter, and the fake engine of the tests, share.

`Running` is one program between two requests. `run` drives many of them in lockstep, so that what they all ask for at
the same time becomes one batch for the engine; `drive` runs one of them on an asynchronous engine.
"""

from __future__ import annotations

import asyncio
import inspect
import traceback
from collections.abc import Callable, Generator, Hashable, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, Protocol

from rl_plugins.core.errors import MethodError, shortened
from rl_plugins.core.method import Method
from rl_plugins.core.requests import (
    UNKNOWN,
    Call,
    Generate,
    Generated,
    Kind,
    Prompt,
    Request,
    Score,
    Scored,
    SideBySide,
    Some,
    Trajectory,
    check_rows,
)
from rl_plugins.core.rollouts import Completion
from rl_plugins.kit.threads import await_left, run_call, run_calls
from rl_plugins.runtime.costs import RowCount
from rl_plugins.runtime.immutability import changes, drawn_from, global_generators, watched
from rl_plugins.runtime.validate_programs import request_problem, row_problem

REQUESTS_PER_TOKEN, IDLE_REQUESTS = 8, 1000  # of a rollout, at most


class Engine(Protocol):
    """Serves a batch of requests at once."""

    def generate(self, requests: Sequence[tuple[Prompt, Generate]]) -> list[list[Generated]]:
        """For each request its n continuations. `max_tokens` is set and at least 1."""
        ...

    def score(self, requests: Sequence[tuple[Prompt, Trajectory]]) -> list[Scored]:
        """The run's reward functions on each trajectory."""
        ...

    def anybody(self, wants: bool) -> bool:
        """Whether any rank wants; all ranks ask together. On one rank: `wants` itself."""
        ...


class AsyncEngine(Protocol):
    """Serves one request at a time, many concurrently."""

    async def generate(self, prompt: Prompt, request: Generate) -> list[Generated]: ...

    async def score(self, prompt: Prompt, trajectory: Trajectory) -> Scored: ...


class Running:
    """A program between two requests.

    Args:
        method: whose program it is.
        prompt: what it works on.
        vocabulary: number of token ids of the policy, None if that is not known.

    Attributes:
        requests: what it waits for, those that need no engine answered already; empty when it has ended.
        rows: rows of each rollout, once it has ended.
        rows_made: rows the engine made for it, returned or not, see `Costs`.
    """

    kinds: tuple[type, ...] = (Generate, Score, Call)
    """Of requests."""

    def __init__(self, method: Method, prompt: Prompt, vocabulary: int | None = None) -> None:
        self.method, self.prompt, self.vocabulary = method, prompt, vocabulary
        self.rows: list[list[Trajectory]] | None = None
        self.requests: list[Request] = []
        self._results: dict[int, Any] = {}
        self._single = False
        self._keys: list[Hashable] | None = None
        self._sides: list[int] = []
        self.rows_made, self._count = 0, RowCount()
        self._asked = 0
        self._given = watched((prompt,))
        self._program = self._placed(lambda: method.rollout(prompt))
        if not isinstance(self._program, Generator):
            if inspect.iscoroutine(self._program):
                self._program.close()
            raise self._error(
                f"it returned {type(self._program).__name__} instead of a generator. A rollout program yields requests."
            )
        self._advance(None)

    @property
    def open(self) -> list[int]:
        """Numbers of the requests without a result."""
        return [i for i in range(len(self.requests)) if i not in self._results]

    def answer(self, number: int, result: Any) -> None:
        """Gives the result of one request; with the last one the program goes on."""
        request = self.requests[number]
        if isinstance(request, Generate):
            self.rows_made += self._count.count(request.trajectory, result)
        self._results[number] = result
        if len(self._results) == len(self.requests):
            results = [self._results[i] for i in range(len(self.requests))]
            self._advance(results[0] if self._single else results)

    def keys(self) -> list[Hashable]:
        """Of each request: one that is still open after `settle` has the same key then."""
        return list(range(len(self.requests))) if self._keys is None else self._keys

    def side(self, number: int) -> int:
        """Which of the programs that run side by side asks: the number of the rollout, in most programs. 0 where none
        do."""
        return self._sides[number] if self._keys is not None else 0

    def settle(self) -> bool:
        """Goes on with the results so far, if the program runs several side by side and there are any."""
        if self._keys is None or not self._results or len(self._results) == len(self.requests):
            return False
        self._advance(Some((self._keys[i], result) for i, result in self._results.items()))
        return True

    def close(self) -> None:
        """Ends the program, so that its `finally` blocks run.

        Raises:
            MethodError: one of them raised or exited, or yields.
        """
        self._placed(self._program.close)

    def _advance(self, answer: Any) -> None:
        while True:
            before = dict(zip(self._keys or (), self.requests, strict=False))
            self.requests, self._results, self._keys = [], {}, None
            generators = global_generators()
            asked, returned = self._placed(partial(_next, self._program, answer))
            if drawn := drawn_from(generators):
                raise self._error(
                    f"it uses the global random generator of {', '.join(drawn)}; use `prompt.rng(purpose)`."
                )
            if asked is None:
                self.rows = self._placed(partial(self._checked, returned))
                return
            self._single = not isinstance(asked, list)
            self.requests = [asked] if self._single else list(asked)
            self._keys, self._sides = (asked.keys, asked.sides) if isinstance(asked, SideBySide) else (None, [])
            self._asked += max(sum(key not in before for key in self._keys or range(len(self.requests))), 1)
            if self._asked > (most := self._most_requests()):
                raise self._error(
                    f"it yielded more than {most} requests for one prompt, so it has no end. Return when there is no "
                    f"room left (`prompt.room`), or after a number of turns."
                )
            for i, request in enumerate(self.requests):
                if self._keys is not None and self._keys[i] in before:
                    self.requests[i] = before[self._keys[i]]  # it is under way
                    continue
                if not isinstance(request, self.kinds):
                    names = ", ".join(kind.__name__ for kind in self.kinds[:-1])
                    raise self._error(
                        f"it yielded {type(request).__name__}. Yield {names} or {self.kinds[-1].__name__}, or a list "
                        f"of them."
                    )
                problem = self._placed(partial(self._problem, request))
                if problem:
                    raise self._error(f"it yielded {problem}.")
                if isinstance(request, Generate):
                    self._limit(i, request)
            if len(self._results) < len(self.requests):
                return
            results = [self._results[i] for i in range(len(self.requests))]
            answer = results[0] if self._single else results

    def _most_requests(self) -> int:
        """Far more than a program makes that ends."""
        p = self.prompt
        return (p.n + p.redundant) * (IDLE_REQUESTS + REQUESTS_PER_TOKEN * p.max_tokens)

    def _problem(self, request: Request) -> str:
        """What cannot be served about a request; empty if nothing is."""
        return request_problem(request, self.vocabulary)

    def _limit(self, i: int, request: Generate) -> None:
        """Sets the limit of new tokens; where there is no room, the answer is known."""
        room = self.prompt.room(request.trajectory)
        limit = room if request.max_tokens is None else min(room, request.max_tokens)
        if limit < 1:
            nothing = Generated((), (), "length", sampled=request.temperature != 0)
            self._results[i] = [nothing] * request.n
        self.requests[i] = replace(request, max_tokens=max(limit, 1))

    def _checked(self, returned: Any) -> list[list[Trajectory]]:
        rollouts = check_rows(returned, self.prompt, self.method.rows_per_rollout)
        if self.prompt.traced:
            rollouts = [[_numbered(row, k) for row in rows] for k, rows in enumerate(rollouts)]
        for row in (row for rows in rollouts for row in rows):
            problem = row_problem(row, self.prompt, self.vocabulary)
            if problem:
                raise MethodError(f"{problem}.")
        self._check_unchanged()
        return rollouts

    def _check_unchanged(self) -> None:
        changed = changes(self._given)
        if changed:
            raise MethodError(f"it changed what it was given: {', '.join(changed)}. Work on a copy.")

    def _placed(self, work: Callable[[], Any]) -> Any:
        """Runs a piece of the program in its place: without a state, errors with the method's name."""
        before, self.method._place = self.method._place, "generation"
        try:
            return work()
        except KeyboardInterrupt:
            raise
        except MethodError as e:
            raise self._error(str(e)) from None
        except BaseException as e:  # an exit, too: the other ranks would wait for this one
            trace = "".join(traceback.format_tb(e.__traceback__)[1:])
            raise self._error(f"{type(e).__name__}: {shortened(e, 2000)}\n{trace}") from e
        finally:
            self.method._place = before

    def _error(self, what: str) -> MethodError:
        return MethodError(
            f"Method `{self.method.name}` failed in `rollout`: {what}\n"
            f"Remove `{self.method.name}` from `methods` to go on without it."
        )


def _numbered(row: Trajectory, number: int) -> Trajectory:
    return row if row.origin is None else replace(row, origin=replace(row.origin, number=number))


def _next(program: Generator[Any, Any, Any], answer: Any) -> tuple[Any, Any]:
    """What a program yields, and None; or None and what it returns. A program that yields None has `Nothing`."""
    try:
        asked = program.send(answer)
    except StopIteration as done:
        return None, done.value
    return _NOTHING if asked is None else asked, None


_NOTHING = type("NoneType", (), {})()  # yielded None: no request


def given_trajectory(prompt: Prompt, given: Completion) -> Trajectory:
    """A completion that a plan gives, as a row: sampled where log-probs are known, else put in the policy's place."""
    n = len(given.tokens)
    observed = given.observed or (False,) * n
    kind = Kind.FORCED if given.logprobs is None else Kind.SAMPLED
    logprobs = given.logprobs or (UNKNOWN,) * n
    return Trajectory(
        prompt.tokens if given.prompt is None else given.prompt,
        given.tokens,
        tuple(int(Kind.OBSERVED if read else kind) for read in observed),
        tuple(UNKNOWN if read else p for p, read in zip(logprobs, observed, strict=True)),
        given.versions or (-1,) * n,
        "eos" if given.tokens[-1] in prompt.chat.eos else "length",
        turns=tuple(given.turns),
        rewards=given.rewards,
    )


def run(programs: Sequence[Running], engine: Engine) -> None:
    """Drives programs to their end, all together. Their `rows` are set then.

    Calls are made before scores and scores before the engine, so that as many programs as possible wait for it at the
    same time. For the same reason programs that ask for samples only wait until none asks for the most likely tokens:
    trees grow to their end first, and what is sampled afterwards from many of them is one batch. On several ranks every
    rank enters every batch, an empty one too.

    Raises:
        MethodError: of a program; whatever the engine raised. The other programs are closed.
    """
    try:
        while True:
            waiting: dict[type, list[tuple[Running, int]]] = {Call: [], Score: [], Generate: []}
            for p in programs:
                for i in p.open:
                    waiting[next(kind for kind in waiting if isinstance(p.requests[i], kind))].append((p, i))
            calls, scores, asked = waiting.values()
            if calls:
                for (p, i), called in zip(calls, run_calls([p.requests[i] for p, i in calls]), strict=True):  # type: ignore[misc]
                    p.answer(i, called)
                continue
            if engine.anybody(bool(scores)):
                scored = engine.score([(p.prompt, p.requests[i].trajectory) for p, i in scores])  # type: ignore[union-attr]
                for (p, i), result in zip(scores, scored, strict=True):
                    p.answer(i, result)
                continue
            growing = {id(p) for p, i in asked if p.requests[i].temperature == 0}  # type: ignore[union-attr]
            if engine.anybody(bool(growing)):
                asked = [(p, i) for p, i in asked if id(p) in growing]
            elif not engine.anybody(bool(asked)):
                return
            generated = engine.generate([(p.prompt, p.requests[i]) for p, i in asked])  # type: ignore[misc]
            for (p, i), many in zip(asked, generated, strict=True):
                p.answer(i, many)
    finally:
        for p in programs:
            p.close()
        await_left()


async def drive(program: Running, engine: AsyncEngine) -> list[list[Trajectory]]:
    """Drives one program to its end and returns its rows.

    Programs that run side by side in it (`together`) go on alone, each as soon as its own requests are answered.

    Raises:
        MethodError: of the program; whatever the engine raised. Requests under way are cancelled.
    """
    under_way: dict[Hashable, asyncio.Task[Any]] = {}
    try:
        while program.rows is None:
            if program.settle():  # where there is no room, the answer is known at once
                continue
            places = {key: i for i, key in enumerate(program.keys())}
            opened = set(program.open)
            for key in [key for key in under_way if key not in places]:
                under_way.pop(key).cancel()  # of a program that was closed
            for key, i in places.items():
                if i in opened and key not in under_way:
                    serving = _serve(engine, program.prompt, program.requests[i], program.side(i))
                    under_way[key] = asyncio.ensure_future(serving)
            done, _ = await asyncio.wait(under_way.values(), return_when=asyncio.FIRST_COMPLETED)
            answered = [(key, places[key]) for key, task in under_way.items() if task in done]
            results = [(i, under_way.pop(key).result()) for key, i in sorted(answered, key=lambda pair: pair[1])]
            for i, result in results:
                program.answer(i, result)
        return program.rows
    finally:
        for task in under_way.values():
            if not task.cancel() and not task.cancelled():
                task.exception()  # one that failed after another is not reported again
        program.close()


SIDE: ContextVar[int] = ContextVar("side", default=0)
"""In a task that serves a request: `Running.side` of it."""


async def _serve(engine: AsyncEngine, prompt: Prompt, request: Request, side: int) -> Any:
    SIDE.set(side)
    if isinstance(request, Generate):
        return await engine.generate(prompt, request)
    if isinstance(request, Score):
        return await engine.score(prompt, request.trajectory)
    return await run_call(request)
