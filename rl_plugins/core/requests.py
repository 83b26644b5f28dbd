"""Rollout programs: what a method may ask for while the completions of one prompt are made. No I/O in here.

A rollout method is a generator. It yields requests, gets their results back, and returns trajectories:

    def rollout(self, prompt):
        first = yield Generate(prompt.start(), n=prompt.n, max_tokens=self.params.probe)
        begun = [prompt.start().add(g) for g in first]
        rest = yield [Generate(t) for t in begun]                 # a list of requests gives a list of results
        return [t.add(g[0]) for t, g in zip(begun, rest)]

There are three requests, `Generate`, `Score` and `Call`. The adapters serve them: TRL puts the pending requests of all
programs of a generation batch into one engine call, verl runs one program per prompt. A program never talks to an
engine, so the same program runs on transformers, on vLLM, on verl's servers and on the fake engine of
`rl_plugins.testing`, and it has no state but its prompt and the payload the driver attached.

`Trajectory` tracks token provenance: token ids exactly as they were generated (nothing is ever tokenized again),
which of them were sampled, put in the policy's place, or only observed, and the log-probs of those that were sampled.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Hashable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

from rl_plugins.core.entries import Entries
from rl_plugins.core.errors import MethodError, shown

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

T = TypeVar("T")
Finish = Literal["", "eos", "stop", "length", "abort"]
MOST_EMPTY = 10_000  # lists without a request that a program yields in a row
UNKNOWN = math.nan
"""The log-prob of a token that was not sampled in its place."""


class Kind(IntEnum):
    """Where a token comes from: it was read (a tool's output, a template), sampled by the policy in exactly this
    context, or put in the policy's place (a hint, the argmax of a tree, a call grafted from another context). Tokens
    that were read carry no gradient; those that were put in have no sampling probability."""

    OBSERVED = 0
    SAMPLED = 1
    FORCED = 2


# ---- results


@dataclass(frozen=True)
class Generated:
    """One continuation.

    Args:
        tokens: the new token ids; none if there was no room, or the engine aborted before the first.
        logprobs: of each, under the distribution it was sampled from, temperature included.
        finish: "eos", "stop" (one of the texts of the request), "length" (limit of the request, of the completion or of
            the context) or "abort" (the engine was interrupted; the tokens so far are good).
        version: published weights that made the last token.
        versions: of each token, where the engine was interrupted and they are not all `version`; else empty.
        top: for every token the most likely tokens in its place with their log-probs at temperature 1, as
            ((token, logprob), ...), most likely first; empty unless asked for.
        sampled: False if the tokens are the argmax, not a sample.
    """

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: Finish
    version: int = 0
    top: tuple[tuple[tuple[int, float], ...], ...] = ()
    sampled: bool = True
    versions: tuple[int, ...] = ()

    def cut(self, length: int) -> Generated:
        """The first `length` tokens."""
        if length >= len(self.tokens):
            return self
        columns = {name: getattr(self, name)[:length] for name in ("tokens", "logprobs", "top", "versions")}
        return replace(self, **columns, finish="length")


@dataclass(frozen=True)
class Scored:
    """What the run's reward functions say of a trajectory.

    Args:
        rewards: of each function by name, NaN where it gave none.
        reward: their weighted sum; NaN if none gave any.
    """

    rewards: Mapping[str, float]
    reward: float


@dataclass(frozen=True)
class Called:
    """What became of a call.

    Args:
        value: what it returned; None after an error.
        error: empty, or what went wrong: the exception, or that it took too long.
    """

    value: Any = None
    error: str = ""


# ---- what a program works with


@dataclass(frozen=True)
class Turn:
    """One turn of an agent: tokens start..stop-1 of its trajectory, and what the environment said of it.

    Args:
        start, stop: of its tokens.
        anchor: what was observed before it, for grouping by state; None: not known.
        reward: of the environment, NaN where it gave none.
        valid: the action was understood.
    """

    start: int
    stop: int
    anchor: Any = None
    reward: float = math.nan
    valid: bool = True


@dataclass(frozen=True)
class Pruned:
    """A branch that grew on a row and was cut off, for the trace.

    Args:
        start: place in the row where it parted from it.
        tokens: its own, from there on.
        score: by which it was pruned.
        why: in a few words.
    """

    start: int
    tokens: Sequence[int] = ()
    score: float = math.nan
    why: str = ""


@dataclass(frozen=True)
class BranchOrigin:
    """Where a row of a tree comes from, for the trace. A program notes it if `Prompt.traced`.

    Args:
        parent: number of the rollout it parted from, in what the program returns; None: it began at the prompt.
        start: place where it parted, counted like `Trajectory.tokens`.
        score: by which the program chose to branch here.
        why: in a few words.
        pruned: what grew on it and was cut off.
        number: of its own rollout; the runtime sets it.
    """

    parent: int | None = None
    start: int = 0
    score: float = math.nan
    why: str = ""
    pruned: Sequence[Pruned] = ()
    number: int = 0


ORIGIN = "rl_plugins_origin"
"""Name of the column of `Rollouts.meta` with the origins of rows, as plain data."""


@dataclass(frozen=True)
class Trajectory:
    """A sequence in the making, and in the end a row. Immutable: every method returns another one.

    Args:
        prompt: token ids of the context, which are not trained.
        tokens: everything after it.
        kinds: `Kind` of each token.
        logprobs: of each token, NaN unless it was sampled in this very context.
        versions: published weights that made each token, -1 for those no policy made.
        finish: why the last generation ended; "" if there was none.
        turns: of an agent, in order.
        rewards: of the run's reward functions, if `Score` computed them: they are not computed again.
        meta: plain data for the driver: `rollouts.meta[name]` of hooks that need "column:name".
        group: None: the prompt's own group; else a label: rows of this prompt with the same label form a group apart.
        origin: of a tree, for the trace; the loss and other hooks do not see it.
    """

    prompt: Sequence[int]
    tokens: Sequence[int] = ()
    kinds: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    versions: Sequence[int] = ()
    finish: Finish = ""
    turns: Sequence[Turn] = ()
    rewards: Mapping[str, float] | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)
    group: Hashable = None
    origin: BranchOrigin | None = None

    def __post_init__(self) -> None:
        for name, code in _CODES.items():
            value = getattr(self, name)
            if type(value) is not Entries:
                object.__setattr__(self, name, Entries(value, code))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def context(self) -> tuple[int, ...]:
        """Everything an engine is given: prompt and tokens."""
        return (*self.prompt, *self.tokens)

    @property
    def context_array(self) -> NDArray[np.int64]:
        """The same as an array, copied in two pieces: for engines that make tensors of it."""
        import numpy as np

        return np.concatenate([np.asarray(self.prompt), np.asarray(self.tokens)])

    @property
    def trained(self) -> tuple[int, ...]:
        """1 for every token that carries a gradient."""
        import numpy as np

        return tuple((np.asarray(self.kinds) != int(Kind.OBSERVED)).astype(int).tolist())

    def add(self, generated: Generated) -> Trajectory:
        """With a continuation that was generated from exactly this trajectory.

        Raises:
            MethodError: `versions` are not of every token.
        """
        kind = Kind.SAMPLED if generated.sampled else Kind.FORCED
        logprobs = generated.logprobs if generated.sampled else None
        versions = generated.versions or (generated.version,)
        return self._with(generated.tokens, kind, logprobs, versions, generated.finish)

    def force(self, tokens: Sequence[int], version: int = -1) -> Trajectory:
        """With tokens put in the policy's place: trained, without a sampling probability."""
        return self._with(tokens, Kind.FORCED, None, (version,))

    def observe(self, tokens: Sequence[int]) -> Trajectory:
        """With tokens the policy only reads."""
        return self._with(tokens, Kind.OBSERVED, None, (-1,))

    def turn(self, start: int, anchor: Any = None, reward: float = math.nan, valid: bool = True) -> Trajectory:
        """With a turn that reaches from `start` to the end."""
        return replace(self, turns=Entries.of(self.turns).grown((Turn(start, len(self), anchor, reward, valid),)))

    def cut(self, length: int) -> Trajectory:
        """The first `length` tokens; a turn that is cut ends there, later ones are gone, and so are rewards."""
        if length >= len(self):
            return self
        turns = tuple(replace(t, stop=min(t.stop, length)) for t in self.turns if t.start < length)
        columns = {name: getattr(self, name)[:length] for name in ("tokens", "kinds", "logprobs", "versions")}
        return replace(self, turns=turns, finish="length", rewards=None, **columns)

    def forget_sampling(self, start: int = 0) -> Trajectory:
        """The tokens from `start` on, which were sampled in another context, count as put in: their log-probs say
        nothing about this one."""
        kinds = [Kind.FORCED if k == Kind.SAMPLED and i >= start else k for i, k in enumerate(self.kinds)]
        logprobs = [UNKNOWN if i >= start else p for i, p in enumerate(self.logprobs)]
        return replace(self, kinds=tuple(kinds), logprobs=tuple(logprobs))

    def scored(self, scored: Scored) -> Trajectory:
        """With the rewards of a `Score`."""
        return replace(self, rewards=scored.rewards)

    def noted(self, **meta: Any) -> Trajectory:
        """With further `meta`."""
        return replace(self, meta={**self.meta, **meta})

    @property
    def columns(self) -> dict[str, Any]:
        """`meta`, and `origin` as plain data if there is one: what travels to the driver."""
        return {**self.meta, **({} if self.origin is None else {ORIGIN: asdict(self.origin)})}

    def _with(
        self,
        tokens: Sequence[int],
        kind: Kind,
        logprobs: Sequence[float] | None,
        versions: Sequence[int],
        finish: Finish = "",
    ) -> Trajectory:
        """Longer by `tokens`; what it has already is not copied. A single version is that of all of them."""
        n, known = len(tokens), Entries.of(self.logprobs, "d")
        if len(versions) not in (1, n):
            raise MethodError(
                f"a continuation of {n} tokens has {len(versions)} `versions`, {shown(list(versions[:8]), 80)} at "
                f"first. Give one of each token, or none and a single `version`."
            )
        return replace(
            self,
            tokens=Entries.of(self.tokens, "q").grown(tokens),
            kinds=Entries.of(self.kinds, "b").grown((int(kind),), n),
            logprobs=known.grown((UNKNOWN,), n) if logprobs is None else known.grown(logprobs),
            versions=Entries.of(self.versions, "q").grown(versions, n if len(versions) == 1 else 1),
            finish=finish,
            rewards=None,
        )


_CODES = {"prompt": "q", "tokens": "q", "kinds": "b", "logprobs": "d", "versions": "q", "turns": ""}


class Chat(Protocol):
    """The tokenizer and chat template of the run; pure functions."""

    @property
    def eos(self) -> tuple[int, ...]:
        """Tokens that end a completion."""
        ...

    @property
    def vocabulary(self) -> int:
        """Number of token ids of the tokenizer."""
        ...

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, without special tokens added."""
        ...

    def decode(self, tokens: Sequence[int], special: bool = False) -> str:
        """The text of tokens, with special tokens or without."""
        ...

    def piece(self, token: int) -> str:
        """The text of a token; bytes of a character that other tokens complete are written `\\xe6`."""
        ...

    def prompt(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids of a conversation up to where the policy answers."""
        ...

    def reply(self, messages: Sequence[Mapping[str, Any]]) -> tuple[int, ...]:
        """Token ids that follow the end of the policy's turn when these messages answer it, up to where it answers
        again. Names of special tokens in the messages are text: an observation ends no turn."""
        ...


@dataclass(frozen=True)
class Prompt:
    """One prompt and what is to be made of it.

    Args:
        tokens: its token ids, rendered by the run's chat template.
        messages: the prompt as the dataset has it: a text or a list of messages.
        columns: its dataset row.
        n: rollouts to return (those that are trained and those that are spare).
        max_tokens: length of a completion, everything after the prompt counted.
        max_context: tokens of prompt and completion together the engine takes.
        chat: tokenizer and template.
        prefix: tokens every completion starts with, forced; `start` has them.
        payload: what the plan attached.
        batch: generation batch, counted from 0.
        training: False in evaluation.
        reward_names: of the run's reward functions.
        max_turns: most turns of an agent as the plan limits them; None: it does not. See `turns`.
        redundant: rollouts to begin beyond `n`, see `rl_plugins.core.redundancy`.
        seed: of random numbers, see `rng`.
        traced: the run has a trace, so that `Trajectory.origin` is kept.
    """

    tokens: tuple[int, ...]
    messages: Any
    columns: Mapping[str, Any]
    n: int
    max_tokens: int
    max_context: int
    chat: Chat
    prefix: tuple[int, ...] = ()
    payload: Any = None
    batch: int = 0
    training: bool = True
    reward_names: tuple[str, ...] = ()
    max_turns: int | None = None
    redundant: int = 0
    seed: str = ""
    traced: bool = False

    def mark(self, name: str) -> Any:
        """What the method of this name attached to the plan row (`PlanRow.marked`), None if nothing."""
        return mark_of(self.payload, name)

    def turns(self, limit: int) -> int:
        """Most turns of an agent: a method's own limit, or that of the plan if it is lower."""
        return limit if self.max_turns is None else min(limit, self.max_turns)

    def start(self) -> Trajectory:
        """An empty trajectory: the prompt, and the prefix of the plan if there is one."""
        begun = Trajectory(self.tokens)
        return begun.force(self.prefix) if self.prefix else begun

    def rng(self, purpose: str, rollout: int = 0) -> np.random.Generator:
        """A fresh generator from (seed, method, generation batch, prompt, purpose, rollout): the same on every host,
        rank and after a resume."""
        import numpy as np

        key = f"{self.seed}|{self.batch}|{purpose}|{rollout}".encode()
        return np.random.default_rng(list(hashlib.sha256(key).digest()))

    def room(self, trajectory: Trajectory) -> int:
        """Tokens that still fit, never less than 0."""
        context = self.max_context - len(trajectory.prompt) - len(trajectory)
        return max(0, min(self.max_tokens - len(trajectory), context))


def mark_of(payload: Any, name: str) -> Any:
    """What a method attached to a plan row, by its name, None if nothing."""
    return payload.get(name) if isinstance(payload, Mapping) else None


# ---- requests


@dataclass(frozen=True)
class Generate:
    """Continue a trajectory with the policy. Result: a list of n `Generated`.

    Args:
        trajectory: what is continued.
        n: independent continuations.
        max_tokens: of new tokens; None: what the completion still has room for, which is the limit in any case. Where
            there is no room the engine is not asked: the result has no token and finish "length".
        stop: generation ends after one of these texts, which stays in the tokens.
        temperature: None: the run's. 0: the most likely token each time.
        top: how many of the most likely tokens to report in every place. The method names the most it asks for in
            `needs` ("engine:logprobs=2"), because not every engine can.
    """

    trajectory: Trajectory
    n: int = 1
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    temperature: float | None = None
    top: int = 0


@dataclass(frozen=True)
class Score:
    """The run's own reward functions on a trajectory. Result: `Scored`.

    Args:
        trajectory: what is scored, finished or not; of a diffusion policy a finished `Sample`.
    """

    trajectory: Any


@dataclass(frozen=True)
class Call:
    """A tool, an environment, a judge: `function(*args)`, with a time-out. Result: `Called`, also when it fails.

    Args:
        function: an ordinary function or a coroutine function. It runs in a thread; one that never returns costs its
            time-out, and its thread until the process ends, so what may hang should run in a process of its own (as
            `rl_plugins.lab.demo.environments` does).
        args: of the function.
        timeout: seconds.
        name: how messages call it.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    timeout: float = 60.0
    name: str = "a call"


Request = Generate | Score | Call
Program = Generator[Any, Any, Sequence["Trajectory | Sequence[Trajectory]"]]
"""Yields a request (and gets its result) or a list of requests (and gets their results), and returns the rollouts: each
is a trajectory, or a list of them where one rollout becomes several rows (agents, turns)."""


class SideBySide(list[Request]):
    """A list of requests of programs that run side by side. Its answer may be `Some` of the results instead of all.

    Args:
        requests: those without a result.
        keys: of each. A request that is still open in the next list has the same key there.
        sides: number of the program that asks, of each.
    """

    def __init__(self, requests: Sequence[Request], keys: Sequence[Hashable], sides: Sequence[int]) -> None:
        super().__init__(requests)
        self.keys, self.sides = list(keys), list(sides)


class Some(dict[Hashable, Any]):
    """Results of a part of a `SideBySide`, by key."""


@dataclass
class _Waiting:
    """What one of several programs asked for, and the results so far by place."""

    asked: list[Request]
    single: bool
    serial: int
    got: dict[int, Any] = field(default_factory=dict)

    @property
    def keys(self) -> list[Hashable]:
        """Of its own requests: nested programs have theirs."""
        if isinstance(self.asked, SideBySide):
            return self.asked.keys
        return [(self.serial, place) for place in range(len(self.asked))]

    def answer(self) -> Any:
        """What the program can go on with; None: nothing yet."""
        if len(self.got) == len(self.asked):
            results = [self.got[place] for place in range(len(self.asked))]
            return results[0] if self.single else results
        if isinstance(self.asked, SideBySide) and self.got:
            return Some((self.asked.keys[place], result) for place, result in self.got.items())
        return None


def together(  # noqa: C901  # one loop and the closures that advance it
    programs: Sequence[Generator[Any, Any, T]], first: int | None = None
) -> Generator[Any, Any, list[T]]:
    """Runs several programs as one: `results = yield from together([one(k) for k in range(n)])`.

    Each is written as if it were alone. In TRL, what they ask for at the same time becomes one batch of the engine. On
    verl's asynchronous engine each goes on as soon as its own requests are answered. The results do not depend on that.

    Args:
        first: redundancy: as soon as this many programs have ended, the others are closed (their `finally` blocks run)
            and only the results of those that ended are returned. Of programs that end at the same moment, the earlier
            in the list count. A program that returns None has failed: it is not counted, and it has no result. Short
            rollouts end earlier, so they are kept more often. None: all programs run to their end.

    Returns:
        The results in the order of the programs, whichever ended first.

    Raises:
        MethodError: `first` is not between 0 and the number of programs.
    """
    most = len(programs) if first is None else first
    if not 0 <= most <= len(programs):
        raise MethodError(f"`first` of together is {first}. It must be between 0 and {len(programs)}, its programs.")
    results: dict[int, Any] = {}
    waiting: dict[int, _Waiting] = {}
    serials = [0] * len(programs)
    mine = object()  # so that no other list has a key of this one

    def enough() -> bool:
        return len(results) == len(programs) or (
            first is not None and sum(r is not None for r in results.values()) >= most
        )

    def advance(i: int, answer: Any) -> None:
        for _ in range(MOST_EMPTY):
            try:
                asked = programs[i].send(answer)
            except StopIteration as done:
                results[i] = done.value
                waiting.pop(i, None)
                return
            serials[i] += 1
            single = not isinstance(asked, list)
            waiting[i] = _Waiting([asked] if single else asked, single, serials[i])
            if waiting[i].asked:
                return
            answer = []  # an empty list of requests is answered at once
        raise MethodError(f"a program of together asked for nothing {MOST_EMPTY} times in a row, so it has no end.")

    try:
        for i in range(len(programs)):
            if not enough():
                advance(i, None)
        while not enough():
            places = [(i, p) for i, w in sorted(waiting.items()) for p in range(len(w.asked)) if p not in w.got]
            keys = [(mine, i, waiting[i].keys[p]) for i, p in places]
            answers = yield SideBySide([waiting[i].asked[p] for i, p in places], keys, [i for i, _ in places])
            given = answers if isinstance(answers, Some) else dict(zip(keys, answers, strict=True))
            touched: dict[int, None] = {}
            for (i, p), key in zip(places, keys, strict=True):
                if key in given:
                    waiting[i].got[p] = given[key]
                    touched[i] = None
            for i in touched:
                answer = waiting[i].answer()
                if answer is not None and not enough():
                    advance(i, answer)
    finally:
        for i, program in enumerate(programs):
            if i not in results:
                program.close()
    return [results[i] for i in sorted(results) if first is None or results[i] is not None]


def check_rows(rollouts: Any, prompt: Prompt, rows_per_rollout: int) -> list[list[Trajectory]]:
    """What a program returned, as rows of each rollout. A rollout may have more rows than are trained in the end.

    Raises:
        MethodError: not trajectories, more rollouts than asked for, or tokens whose provenance does not add up.
    """
    import numpy as np

    if not isinstance(rollouts, Sequence) or isinstance(rollouts, str):
        raise MethodError(f"the program returned {type(rollouts).__name__} instead of a list of trajectories.")
    for r in rollouts:
        if not isinstance(r, Trajectory | list | tuple):
            raise MethodError(f"the program returned a list with {type(r).__name__} instead of a trajectory.")
    rows = [[r] if isinstance(r, Trajectory) else list(r) for r in rollouts]
    if len(rows) > prompt.n * rows_per_rollout:
        raise MethodError(
            f"the program returned {len(rows)} rollouts for a prompt that asks for {prompt.n}"
            f"{f' of up to {rows_per_rollout} rows' if rows_per_rollout > 1 else ''}; return at most "
            f"{prompt.n * rows_per_rollout}."
        )
    for row in (row for rollout in rows for row in rollout):
        if not isinstance(row, Trajectory):
            raise MethodError(f"the program returned {type(row).__name__} instead of a trajectory.")
        lengths = {len(row.tokens), len(row.kinds), len(row.logprobs), len(row.versions)}
        if len(lengths) != 1:
            raise MethodError(f"a trajectory has columns of different lengths {sorted(lengths)}.")
        if len(row) > prompt.max_tokens:
            raise MethodError(f"a trajectory has {len(row)} tokens, the completion length is {prompt.max_tokens}.")
        if any(not 0 <= t.start < t.stop <= len(row) for t in row.turns):
            raise MethodError(f"a turn lies outside of its trajectory of {len(row)} tokens, or is empty.")
        if bool(np.any((np.asarray(row.kinds) == int(Kind.SAMPLED)) & np.isnan(np.asarray(row.logprobs)))):
            raise MethodError("a sampled token has no log-prob; tokens sampled elsewhere are put in with `force`.")
    return rows
