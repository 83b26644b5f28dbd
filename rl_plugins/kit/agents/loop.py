"""Episodes of an agent inside a rollout program: generate a turn, let the environment act, read what it says.

    def rollout(self, prompt):
        p = self.params

        def play_one(episode, number, opened):
            while not episode.stop:
                episode = yield from turn(prompt, episode, p.turn_tokens, p.timeout)
                episode = go_on(prompt, episode, limit=8)
            return (yield from finish(episode, p.timeout))

        return (yield from episodes(self, prompt, play_one))

Methods that change the loop (reminders, rollback, branching) put its pieces together in their own order. `play` is the
loop above as it is, without a method.

Nothing that an environment does ends the run. All of its calls, the constructor's too, go through `Call`: with a time
limit, and those of several episodes at the same time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.params import MethodParams, param
from rl_plugins.core.redundancy import independent
from rl_plugins.core.requests import Call, Called, Generate, Prompt, Trajectory
from rl_plugins.kit.agents.environment import (
    Environment,
    Observation,
    check_environment,
    check_methods,
    observed,
    scored,
)
from rl_plugins.kit.prompts import appended
from rl_plugins.kit.services import prompt_text
from rl_plugins.kit.threads import answer_of, leave_call

if TYPE_CHECKING:
    from rl_plugins.core.method import Method

Subprogram = Generator[Any, Any, Any]


@dataclass(frozen=True)
class AgentParams(MethodParams):
    """Parameters of methods that play an agent in an environment."""

    environment: Callable[..., Any] | None = param(
        None, "class or function without arguments that makes an environment; required"
    )
    turn_tokens: int | None = param(None, "most tokens of a turn; none: the room left in the completion", ge=1)
    timeout: float = param(60.0, "time limit of one call of the environment, in seconds", gt=0)
    role: str = param("user", "role of the messages with the environment's replies")

    def check(self) -> None:
        if self.environment is None:
            raise ConfigError(
                "`environment` is not given. Give a class or function without arguments that makes an environment, as "
                "module:attribute (the demo's: rl_plugins.lab.demo.environments:Grid)."
            )
        check_environment(self.environment)


@dataclass(frozen=True)
class Episode:
    """An agent in its environment, between two turns.

    Args:
        environment: of this rollout alone.
        trajectory: so far; it ends with what the agent reads next.
        observation: what it reads.
        turns: finished ones.
        broken: what made the environment unusable; empty if nothing did.
        stop: why the episode is over, empty while it goes on: "done" or "error" (of the environment), "length" (nothing
            more fits), "aborted" (the engine made no token), "limit" (of turns), or a method's own reason.
    """

    environment: Any
    trajectory: Trajectory
    observation: Observation
    turns: int = 0
    broken: str = ""
    stop: str = ""

    @property
    def done(self) -> bool:
        """The environment said so, or is broken."""
        return self.observation.done or bool(self.broken)

    @property
    def anchor(self) -> Any:
        """What identifies the state the agent acts in."""
        return self.observation.anchor


class Opened:
    """The environments of a program, which are closed when it ends, however it ends.

    Args:
        timeout: seconds that closing one may take.
        warn: is told of one that cannot be closed, and may hold its resources.
    """

    def __init__(self, timeout: float, warn: Callable[[str], None] = lambda message: None) -> None:
        self._timeout, self._warn, self._open, self._over = timeout, warn, list[Environment](), False

    def make(self, factory: Callable[[], Any]) -> Environment:
        """An environment that this program closes; for a `Call`. One that comes too late is closed at once.

        Raises:
            ConfigError: what the factory makes is no environment.
        """
        environment: Environment = answer_of(factory)
        check_methods(environment, type(environment).__name__)
        self._open.append(environment)
        if self._over:
            answer_of(environment.close)
        return environment

    def during(self, program: Subprogram) -> Subprogram:
        """The program, and what it returns (`yield from` it)."""
        try:
            made = yield from program
        except BaseException:  # also where the program is closed, and may ask for nothing more
            for call in self._closing():
                leave_call(call)
            raise
        calls = self._closing()
        for call, called in zip(calls, (yield calls), strict=True):
            if called.error:
                self._warn(f"{call.name} failed: {called.error}")
        return made

    def _closing(self) -> list[Call]:
        self._over = True
        return [Call(e.close, (), self._timeout, f"`close` of the environment {_name(e)}") for e in self._open]


def episodes(
    method: Method, prompt: Prompt, play_one: Callable[[Episode, int, Opened], Subprogram], first: str = ""
) -> Subprogram:
    """The rollouts of a prompt (`yield from` it), each an episode in an environment of its own. One whose environment
    cannot be made or reset is a row without tokens and reward.

    Args:
        method: its parameters are `AgentParams`.
        play_one: (episode, number of the rollout, its environments) -> program that returns the trajectory. An episode
            that could not begin has stopped already.
        first: text behind the first observation.
    """
    p = method.params

    def one(number: int) -> Subprogram:
        opened = Opened(p.timeout, method.warn)

        def whole() -> Subprogram:
            episode = yield from open_episode(prompt, p.environment, opened, p.timeout, first)
            return (yield from play_one(episode, number, opened))

        made = yield from opened.during(whole())
        if made.meta["error"]:
            method.warn(f"an episode has no score: {made.meta['error']}")
        return made

    return (yield from independent(prompt, one))


def open_episode(
    prompt: Prompt, make: Callable[[], Any], opened: Opened, timeout: float = 60.0, extra: str = ""
) -> Subprogram:
    """Makes an environment and resets it (`yield from` it). Its text is appended to the last message the policy reads,
    unless the prompt's text has it already, and `extra` behind that. Returns an `Episode`. Where the environment cannot
    be had it has stopped, and its trajectory has the rewards NaN."""
    name = getattr(make, "__name__", type(make).__name__)
    called: Called = yield Call(opened.make, (make,), timeout, f"the constructor of the environment {name}")
    environment, start = called.value, prompt.start()
    error = called.error and f"the environment {name} cannot be made: {called.error}"
    if not error:
        first, error = yield from _asked(environment, "reset", dict(prompt.columns), timeout)
        error = error and f"the environment {name} cannot be reset: {error}"
    if error:
        nothing = replace(start, rewards=dict.fromkeys(prompt.reward_names, math.nan))
        return Episode(environment, nothing, Observation("", valid=False), broken=error, stop="error")
    said = "" if first.text in prompt_text(prompt.messages) else first.text
    if said or extra:
        messages = appended(prompt.messages, "\n".join(filter(None, (said, extra))))
        start = replace(start, prompt=prompt.chat.prompt(messages))
    return Episode(environment, start, first)


def turn(prompt: Prompt, episode: Episode, turn_tokens: int | None = None, timeout: float = 60.0) -> Subprogram:
    """One turn (`yield from` it): the policy speaks, the environment acts. Returns the `Episode` after it."""
    trajectory = yield from generate(episode.trajectory, turn_tokens)
    return (yield from act(prompt, episode, trajectory, timeout))


def generate(trajectory: Trajectory, max_tokens: int | None = None) -> Subprogram:
    """The policy's next turn (`yield from` it); a generation the engine interrupts is continued. Returns the trajectory
    with it, which is no longer than before if nothing fits or the engine makes no token."""
    start = len(trajectory)
    while True:
        left = None if max_tokens is None else max_tokens - (len(trajectory) - start)
        (made,) = yield Generate(trajectory, max_tokens=left)
        trajectory = trajectory.add(made)
        if made.finish != "abort" or not made.tokens or len(made.tokens) == left:
            return trajectory


def act(prompt: Prompt, episode: Episode, trajectory: Trajectory, timeout: float = 60.0) -> Subprogram:
    """Lets the environment take what the agent generated behind `episode.trajectory` (`yield from` it). Returns the
    `Episode` after it, whose trajectory has the turn, but not yet the observation (see `reply`). Where no token was
    generated the environment is not asked, and the episode has stopped.

    An environment that raises, hangs or answers no observation is broken: nobody knows its state, so the episode ends
    with an invalid turn.
    """
    start = len(episode.trajectory)
    if len(trajectory) == start:
        return replace(episode, stop="length" if trajectory.finish == "length" else "aborted")
    action = prompt.chat.decode(trajectory.tokens[start:])
    after, error = yield from _asked(episode.environment, "act", action, timeout)
    trajectory = trajectory.turn(start, episode.anchor, after.reward, after.valid)
    stop = "error" if error else "done" if after.done else ""
    return Episode(episode.environment, trajectory, after, episode.turns + 1, error, stop)


def reply(prompt: Prompt, episode: Episode, extra: str = "", role: str = "user") -> Episode:
    """With the observation, and `extra` behind it, as a message the agent reads next. A turn that was cut off is ended
    first, with a token the agent only reads."""
    text = "\n".join(part for part in (episode.observation.text, extra) if part)
    tokens = prompt.chat.reply([{"role": role, "content": text}])
    spoken = episode.trajectory.tokens
    end = prompt.chat.eos[:1] if spoken and spoken[-1] not in prompt.chat.eos else ()
    return replace(episode, trajectory=episode.trajectory.observe((*end, *tokens)))


def go_on(prompt: Prompt, episode: Episode, limit: int, extra: str = "", role: str = "user") -> Episode:
    """`reply` where another turn follows. Else the episode has stopped: after `limit` turns (the plan's limit holds if
    it is lower), or where the observation would leave no room for an answer; then it is not added."""
    if episode.stop:
        return episode
    if episode.turns >= prompt.turns(limit):
        return replace(episode, stop="limit")
    following = reply(prompt, episode, extra, role)
    return following if prompt.room(following.trajectory) else replace(episode, stop="length")


def finish(episode: Episode, timeout: float = 60.0, **meta: Any) -> Subprogram:
    """The trajectory of an episode that is over (`yield from` it), with what reward functions and metrics may want of
    it as `meta`: `score` (of the environment; if it has no `score()`, the sum of its rewards of turns; NaN if it gave
    none or is broken), `turns`, `done`, `stop_reason` (`Episode.stop`), `error`."""
    score = getattr(episode.environment, "score", None)
    rewards = [turn.reward for turn in episode.trajectory.turns if not math.isnan(turn.reward)]
    value, error = math.nan, episode.broken
    if not error and callable(score):
        name = _name(episode.environment)
        called = yield Call(score, (), timeout, f"`score` of the environment {name}")
        value, wrong = scored(called.value)
        error = called.error or wrong
        error = error and f"the environment {name} cannot be scored: {error}"
    elif not error and rewards:
        value = sum(rewards)
    done = episode.observation.done and not episode.broken
    told = {"score": value, "turns": episode.turns, "done": done, "stop_reason": episode.stop, "error": error}
    made = episode.trajectory.noted(**told, **meta)
    return replace(made, finish="length") if episode.stop == "length" else made


def play(
    prompt: Prompt,
    make: Callable[[], Any],
    max_turns: int,
    timeout: float = 60.0,
    turn_tokens: int | None = None,
    role: str = "user",
) -> Subprogram:
    """One rollout of an agent, as a program of its own. Returns its trajectory, with the `meta` of `finish`.

    It ends when the environment is done, after `max_turns` or the plan's limit, or when nothing more fits.

    Args:
        make: a new environment.
        max_turns: of the agent; the plan's limit holds if it is lower.
        timeout: seconds of one call of the environment.
        turn_tokens: most tokens of one turn.
        role: of the messages the environment's observations become.
    """
    opened = Opened(timeout)

    def whole() -> Subprogram:
        episode = yield from open_episode(prompt, make, opened, timeout)
        while not episode.stop:
            episode = yield from turn(prompt, episode, turn_tokens, timeout)
            episode = go_on(prompt, episode, max_turns, role=role)
        return (yield from finish(episode, timeout))

    return (yield from opened.during(whole()))


def _asked(environment: Any, method: str, argument: Any, timeout: float) -> Subprogram:
    """The observation that an environment answers with, and an error, empty if there is none."""
    name = f"`{method}` of the environment {_name(environment)}"
    called: Called = yield Call(getattr(environment, method), (argument,), timeout, name)
    try:
        if not called.error:
            return observed(environment, method, called.value), ""
        error = called.error
    except ConfigError as e:
        error = str(e)
    return Observation(error, valid=False), error


def _name(environment: Any) -> str:
    return type(environment).__name__
