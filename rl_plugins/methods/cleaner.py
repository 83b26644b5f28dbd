"""CLEANER (arXiv 2601.15141): repairs a failed tool call during the rollout and removes the failure."""

from __future__ import annotations

import copy
from bisect import bisect_left
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import partial
from typing import Any, Literal

from rl_plugins import Call, ConfigError, Idle, Method, MethodError, Program, Prompt, Run, Trajectory, param
from rl_plugins.core.files import read_json
from rl_plugins.core.params import GIVEN, above
from rl_plugins.core.requests import Kind
from rl_plugins.kit.agents import AgentParams, Episode, Opened, act, episodes, finish, generate, go_on, reply
from rl_plugins.kit.start_checks import refuse_beyond_completion
from rl_plugins.kit.texts import tokens_before

PATTERNS = (
    *("ImportError", "ModuleNotFoundError", "SyntaxError", "IndexError", "IndentationError", "NameError", "TypeError"),
    *("worker_timeout", "NotImplementedError", "ValueError", "ZeroDivisionError"),
)
SUCCESS = "Tool call success"
NOTE = "Note: this has failed {retries} times in a row. Try another approach."

# where parameters have an effect
_ROLLED_BACK = {"rollback_probability": above(0)}
_REPAIRED = {"max_tool_retries": above(0), **_ROLLED_BACK}
_MARKED = {**_REPAIRED, "marker": GIVEN}
_COMPARED = {**_MARKED, "gamma": above(0)}
_NOTED = {**_REPAIRED, "max_tool_retries": above(1)}
_SWITCHED = ({"max_tool_retries": above(0)}, {"copy_environment": True})
_ATTEMPTED = (_REPAIRED, {"copy_environment": True})


class Cleaner(Method):
    """Similarity-aware adaptive rollback: trains the policy on the call that it should have made the first time.

    A turn is reasoning and a call, which begins at `marker`. When the call o of a turn fails:

        aside, after the failed turn and its error, the policy generates another turn with a call n
        s = difflib ratio of the texts of o and n, 0 to 1
        s >= gamma:  reasoning of o + call of n      (shallow: the call is swapped)
        s <  gamma:  the whole turn of n             (deep: the reasoning goes, too)
        the error and the failed call are gone; the environment takes the repaired turn; again up to K times

    After K retries the last failed call and its error stay, with a `note` after two or more retries, and repairs end.
    They also end if the other turn has no call: the error and that turn stay as sampled. With probability 1 -
    rollback_probability per rollout this is the plain agent loop. A call has failed if the environment says so
    (`errors: invalid`), or if the text that it returns is not empty and lacks `success_marker` (`text`).

    Symbols: tokens of n were sampled in another context, so they are forced: trained, without a rollout log-prob (NaN).
    `meta` of a row has the counts `calls` (first attempts), `failed_calls` (of those), `recovered`, `given_up`,
    `retries`, `repairs`, `deep_repairs`, and `error_types`, `stop_reason`, `score`, `turns`, `done`, `error`.

    Special cases: an empty other turn counts as a retry. Nothing is repaired at the last of `max_turns` turns and after
    `max_attempts` calls. A repaired turn that is too long, or an environment that breaks, ends the rollout. With
    `copy_environment` the repaired call goes to the copy made before the failed one.

    Raises:
        ConfigError: no environment, a note that cannot be filled in.
        MethodError: the environment cannot be copied.

    Source: arXiv 2601.15141; Tianshi-Xu/Open-CLEANER, verl/verl/experimental/agent_loop/tool_agent_loop.py (commit
    91e40ad7), whose merges the golden cases are.
    """

    name = "cleaner"
    fidelity = "code"
    does = "Repairs a failed tool call during the rollout and removes the failure from the trajectory"
    problems = ("agents",)
    needs = frozenset({"chat_template"})
    brings = frozenset({"forced_tokens", "redundancy"})
    in_eval = ("rollout",)
    idle = (Idle({"retries": 0}, "no call was retried: see cleaner/failed_calls, `errors` and `marker`."),)

    @dataclass(frozen=True)
    class Params(AgentParams):
        gamma: float = param(0.5, "lowest similarity that swaps only the call", ge=0, only_if=_MARKED)
        max_tool_retries: int = param(3, "K, most retries of a turn; 0: nothing is repaired", ge=0)
        rollback_probability: float = param(1.0, "probability of repairs in a rollout", ge=0, le=1, only_if=_SWITCHED)
        max_attempts: int = param(30, "calls of a rollout after which nothing is repaired", ge=1, only_if=_ATTEMPTED)
        marker: str = param("<tool_call>", "text that begins a call; empty: the whole turn is the call")
        compare: Literal["call_text", "code"] = param("call_text", "compared texts: call or code", only_if=_COMPARED)
        boundary: Literal["exact", "code_compat"] = param(
            "exact", "rule for a marker of several tokens", only_if=_MARKED
        )
        errors: Literal["invalid", "text"] = param("invalid", "sign of a failed call: `valid`, or its text")
        success_marker: str = param(SUCCESS, "text in the result of every successful call", only_if={"errors": "text"})
        patterns: tuple[str, ...] = param(PATTERNS, "names of errors, counted in `meta`", only_if={"errors": "text"})
        copy_environment: bool = param(False, "copies of the environment before each call", only_if=_ROLLED_BACK)
        note: str = param(NOTE, "text added to the error, with {retries}", only_if=_NOTED)
        max_turns: int = param(16, "most turns of the agent", ge=1)

        def check(self) -> None:
            super().check()
            try:
                self.note.format(retries=2)
            except (KeyError, IndexError, ValueError, AttributeError) as e:
                raise ConfigError(
                    f"`note` is {self.note!r} and cannot be filled in ({type(e).__name__}: {e}). It may hold "
                    f"{{retries}}; other braces are written twice."
                ) from None

    def check(self, run: Run) -> None:
        refuse_beyond_completion(run, "turn_tokens", self.params.turn_tokens, "this limit has no effect")

    def rollout(self, prompt: Prompt) -> Program:
        p = self.params

        def play(episode: Episode, number: int, opened: Opened) -> Generator[Any, Any, Trajectory]:
            book = _Book(opened, off=bool(prompt.rng("rollback", number).random() >= p.rollback_probability))
            while not episode.stop:
                turn = yield from generate(episode.trajectory, p.turn_tokens)
                episode, note = yield from self._take(prompt, episode, turn, book)
                episode = go_on(prompt, episode, p.max_turns, note, p.role)
            return (yield from finish(episode, p.timeout, error_types=list(book.error_types), **book.counts))

        trajectories = yield from episodes(self, prompt, play)
        if prompt.training:
            self._report(trajectories)
        return trajectories

    def _take(
        self, prompt: Prompt, episode: Episode, turn: Trajectory, book: _Book
    ) -> Generator[Any, Any, tuple[Episode, str]]:
        """Lets the environment take a turn, and repairs its call where that fails.

        Args:
            episode: before the turn.
            turn: the trajectory of `episode` with the turn.

        Returns:
            The episode after the turn, as it will be trained, and a note to the agent.
        """
        if len(turn) == len(episode.trajectory):
            return (yield from act(prompt, episode, turn)), ""
        attempt, retries = _Attempt(episode, turn), 0
        while True:
            after, wrong, backup = yield from self._execute(prompt, attempt, book, first=retries == 0)
            if not wrong:
                book.count(recovered=retries > 0)
                return after, ""
            other = None
            if self._may_repair(prompt, after, backup, retries, book):
                error = reply(prompt, after, role=self.params.role)
                other, retries = yield from self._another_turn(prompt, error, retries, book)
            if other is None:
                return after, self._give_up(retries, book)
            if self._is_call(prompt, other.tokens):
                attempt = self._merged(prompt, attempt, other, backup, book)
            else:  # the error and the turn without a call stay as they were sampled
                self._give_up(0, book)
                if not prompt.room(error.trajectory):
                    return replace(after, stop=after.stop or "length"), ""
                attempt, retries = _Attempt(error, _joined(error.trajectory, other)), 0
            fits = min(prompt.max_tokens, prompt.max_context - len(attempt.turn.prompt))
            if len(attempt.turn) > fits:
                return attempt.cut(fits), ""

    def _is_call(self, prompt: Prompt, tokens: Sequence[int]) -> bool:
        return self.params.marker in prompt.chat.decode(tokens, special=True)

    def _execute(
        self, prompt: Prompt, attempt: _Attempt, book: _Book, first: bool
    ) -> Generator[Any, Any, tuple[Episode, str, Any]]:
        """The environment takes the turn. A copy made before takes the place of an environment that broke.

        Returns:
            The episode after the turn, the error of its call (empty without one), and the copy if one was made.
        """
        p, backup = self.params, None
        is_call = self._is_call(prompt, attempt.tokens)
        if p.copy_environment and is_call and not book.off:
            backup = yield from self._copy(attempt.episode.environment, book)
        after = yield from act(prompt, attempt.episode, attempt.turn, p.timeout)
        if backup is not None and after.broken:
            after = replace(after, environment=backup, broken="", stop="")
        wrong = self._error(after) if is_call else ""
        if first:
            book.count(calls=is_call, failed_calls=bool(wrong))
            book.error_types += [wrong] if wrong else []
        book.attempts += is_call
        book.off |= book.attempts >= p.max_attempts
        return after, wrong, backup

    def _may_repair(self, prompt: Prompt, after: Episode, backup: Any, retries: int, book: _Book) -> bool:
        p = self.params
        over = after.done and backup is None  # the failed call ended the episode, and there is no copy to go on with
        return not (book.off or retries >= p.max_tool_retries or after.turns >= prompt.turns(p.max_turns) or over)

    def _another_turn(
        self, prompt: Prompt, error: Episode, retries: int, book: _Book
    ) -> Generator[Any, Any, tuple[Trajectory | None, int]]:
        """The turn that the policy generates after its error, and the retries so far; None without room or retries.

        It is made aside, where the limit of the completion does not count. An empty one counts as a retry.
        """
        made = Trajectory(error.trajectory.context)
        if prompt.room(made):
            while not made.tokens and retries < self.params.max_tool_retries:
                retries += 1
                book.count(retries=1)
                made = yield from generate(made, self.params.turn_tokens)
        return (made if made.tokens else None), retries

    def _merged(self, prompt: Prompt, attempt: _Attempt, other: Trajectory, backup: Any, book: _Book) -> _Attempt:
        """The failed turn with the call of the other one, or replaced by it, in the environment as it was before."""
        decode = partial(prompt.chat.decode, special=True)
        merge = merge_turns(attempt.tokens, other.tokens, decode, self.params)
        book.count(repairs=1, deep_repairs=merge.deep)
        kept = attempt.turn.cut(attempt.start + merge.keep)
        episode = attempt.episode if backup is None else replace(attempt.episode, environment=backup)
        return _Attempt(episode, _joined(kept, other.forget_sampling(), merge.begin))

    def _give_up(self, retries: int, book: _Book) -> str:
        """Repairs nothing more in this rollout; returns the note to the agent."""
        book.off = True
        book.count(given_up=1)
        return self.params.note.format(retries=retries) if retries >= 2 else ""

    def _error(self, episode: Episode) -> str:
        """What is wrong with the call that was just made; empty if nothing is."""
        p, said = self.params, episode.observation
        if p.errors == "invalid" or episode.broken:
            return "" if said.valid else "invalid"
        return error_type(said.text, p.success_marker, p.patterns) or ""

    def _copy(self, environment: Any, book: _Book) -> Generator[Any, Any, Any]:
        name, copied = type(environment).__name__, partial(copy.deepcopy, environment)
        called = yield Call(book.opened.make, (copied,), self.params.timeout, f"the copy of the environment {name}")
        if called.error:
            raise MethodError(
                f"the environment {name} cannot be copied with copy.deepcopy ({called.error}). Give it a __deepcopy__, "
                f"or set `copy_environment` to false, which is right where a failed call changes nothing."
            )
        return called.value

    def _report(self, trajectories: Sequence[Trajectory]) -> None:
        total = {name: sum(t.meta[name] for t in trajectories) for name in COUNTS}
        trained = sum(sum(t.trained) for t in trajectories)
        for name, part, of in (
            ("failed_calls", total["failed_calls"], total["calls"]),
            ("recovered", total["recovered"], total["failed_calls"]),
            ("deep", total["deep_repairs"], total["repairs"]),
            ("retries", total["retries"], len(trajectories)),
            ("grafted", sum(t.kinds.count(Kind.FORCED) for t in trajectories), trained),
        ):
            if of:
                self.log(name, part / of, weight=of)


COUNTS = ("calls", "failed_calls", "recovered", "given_up", "retries", "repairs", "deep_repairs")


@dataclass
class _Book:
    """What happened in one rollout so far.

    Args:
        opened: its environments, copies too.
        off: nothing is repaired any more.
        attempts: calls made, retries counted.
    """

    opened: Opened
    off: bool
    attempts: int = 0
    error_types: list[str] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))

    def count(self, **more: int) -> None:
        for name, n in more.items():
            self.counts[name] += int(n)


@dataclass(frozen=True)
class _Attempt:
    """A turn that the environment is to take.

    Args:
        episode: before the turn.
        turn: the trajectory of `episode` with the turn.
    """

    episode: Episode
    turn: Trajectory

    @property
    def start(self) -> int:
        """Tokens before the turn."""
        return len(self.episode.trajectory)

    @property
    def tokens(self) -> Sequence[int]:
        return self.turn.tokens[self.start :]

    def cut(self, fits: int) -> Episode:
        """The episode with as much of the turn as fits, which the environment does not take."""
        cut = self.turn.cut(fits).turn(self.start, self.episode.anchor, valid=False)
        return replace(self.episode, trajectory=cut, turns=self.episode.turns + 1, stop="length")


@dataclass(frozen=True)
class Merge:
    """How a failed turn and the one after it become one: tokens 0 to keep-1 of the failed turn, and those of the other
    from `begin` on.

    Args:
        keep, begin: 0 and 0 where the whole turn is replaced.
        similarity: of the calls, 0 to 1; None if one of the turns has none.
        deep: the whole turn is replaced.
    """

    keep: int
    begin: int
    similarity: float | None
    deep: bool


def merge_turns(old: Sequence[int], new: Sequence[int], decode: Callable[[Sequence[int]], str], p: Any) -> Merge:
    """The merge of a failed turn `old` with `new` (token ids).

    Args:
        decode: text of tokens, special ones included.
        p: parameters `gamma`, `marker`, `boundary` and `compare`.
    """
    keep, begin = call_start(old, decode, p.marker, p.boundary), call_start(new, decode, p.marker, p.boundary)
    if keep is None or begin is None:
        return Merge(0, 0, None, True)
    was, becomes = decode(old[keep:]), decode(new[begin:])
    if p.compare == "code":
        was, becomes = code_of(was), code_of(becomes)
    similarity = SequenceMatcher(None, was, becomes).ratio()
    return Merge(0, 0, similarity, True) if similarity < p.gamma else Merge(keep, begin, similarity, False)


def call_start(tokens: Sequence[int], decode: Callable[[Sequence[int]], str], marker: str, boundary: str) -> int | None:
    """Number of the token with which the call begins: the first behind the tokens that fit before the marker ("exact"),
    or the one with which the marker is complete ("code_compat"); None without a marker. The text grows with the tokens,
    so both are found by bisection."""
    text = decode(tokens)
    place = text.find(marker)
    if place < 0 or not marker:
        return 0 if not marker else None
    if boundary == "exact":
        return tokens_before(tokens, decode, place)
    head = text[: place + len(marker)]
    return bisect_left(range(len(tokens)), True, key=lambda i: decode(tokens[: i + 1]).startswith(head))


def code_of(call: str) -> str:
    """The arguments of a call that is written as a JSON object with `arguments`, one per line; else the call."""
    try:
        arguments = read_json(call[call.find("{") : call.rfind("}") + 1])["arguments"]
    except (ValueError, KeyError, TypeError):
        return call
    if isinstance(arguments, dict):
        return "\n".join(str(value) for value in arguments.values())
    return arguments if isinstance(arguments, str) else call


def error_type(text: str, success_marker: str = SUCCESS, patterns: Sequence[str] = PATTERNS) -> str | None:
    """The error a tool's text tells of: the first pattern in it, else "unknown_error"; None if it is empty or tells of
    success."""
    if not text or success_marker in text:
        return None
    return next((pattern for pattern in patterns if pattern in text), "unknown_error")


def _joined(trajectory: Trajectory, made: Trajectory, begin: int = 0) -> Trajectory:
    """With the tokens of another trajectory from `begin` on, and all that is known of them."""
    return replace(
        trajectory,
        tokens=(*trajectory.tokens, *made.tokens[begin:]),
        kinds=(*trajectory.kinds, *made.kinds[begin:]),
        logprobs=(*trajectory.logprobs, *made.logprobs[begin:]),
        versions=(*trajectory.versions, *made.versions[begin:]),
        finish=made.finish,
        rewards=None,
    )
