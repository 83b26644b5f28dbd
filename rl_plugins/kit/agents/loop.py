"""Turns of an agent inside a rollout program: generate an action, let the environment act, read what it says.

    def rollout(self, prompt):
        return (yield from together([play(prompt, self.params.environment, max_turns=8) for _ in range(prompt.n)]))

`play` is the plain loop; methods that change it (reminders, rollback, branching) put the same pieces together in their
own order: `open_episode`, `generate`, `act`, `reply`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import dataclass, replace
from typing import Any

from rl_plugins.core.errors import MethodError
from rl_plugins.core.requests import Call, Called, Generate, Prompt, Trajectory
from rl_plugins.kit.agents.environment import Environment, Observation, observed
from rl_plugins.kit.services import prompt_text

Subprogram = Generator[Any, Any, Any]


@dataclass(frozen=True)
class Episode:
    """An agent in its environment, between two turns.

    Args:
        environment: of this rollout alone.
        trajectory: so far; it ends with what the agent reads next.
        observation: what it reads.
        turns: finished ones.
        broken: what made the environment unusable; empty if nothing did.
    """

    environment: Environment
    trajectory: Trajectory
    observation: Observation
    turns: int = 0
    broken: str = ""

    @property
    def done(self) -> bool:
        """The environment said so, or is broken."""
        return self.observation.done or bool(self.broken)

    @property
    def anchor(self) -> Any:
        """What identifies the state the agent acts in."""
        return self.observation.anchor


def open_episode(prompt: Prompt, environment: Environment, timeout: float = 60.0, extra: str = "") -> Subprogram:
    """Resets the environment (`yield from` it). Its text is appended to the last message, unless the
    prompt's text has it already, and `extra` behind that. Returns an `Episode`.

    Raises:
        MethodError: the environment cannot be reset.
        ConfigError: what it returned is no observation.
    """
    called: Called = yield Call(environment.reset, (dict(prompt.columns),), timeout, "reset of the environment")
    if called.error:
        raise MethodError(f"the environment {type(environment).__name__} cannot be reset: {called.error}.")
    first = observed(environment, "reset", called.value)
    trajectory = prompt.start()
    said = "" if first.text in prompt_text(prompt.messages) else first.text
    if said or extra:
        messages = prompt.messages
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else [dict(m) for m in messages]
        messages[-1]["content"] = "\n".join(part for part in (messages[-1]["content"], said, extra) if part)
        trajectory = replace(trajectory, prompt=prompt.chat.prompt(messages))
    return Episode(environment, trajectory, first)


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
    `Episode` after it, whose trajectory has the turn, but not yet the observation (see `reply`).

    An environment that raises or hangs is broken: nobody knows its state, so the episode ends with an invalid turn.

    Raises:
        ConfigError: what it returned is no observation.
    """
    start = len(episode.trajectory)
    action = prompt.chat.decode(trajectory.tokens[start:])
    name = f"the environment {type(episode.environment).__name__}"
    called: Called = yield Call(episode.environment.act, (action,), timeout, name)
    after = Observation(called.error, valid=False)
    if not called.error:
        after = observed(episode.environment, "act", called.value)
    if len(trajectory) > start:
        trajectory = trajectory.turn(start, episode.anchor, after.reward, after.valid)
    return Episode(episode.environment, trajectory, after, episode.turns + 1, called.error)


def reply(prompt: Prompt, episode: Episode, extra: str = "", role: str = "user") -> Episode:
    """With the observation, and `extra` behind it, as a message the agent reads next. A turn that was cut off is ended
    first, with a token the agent only reads."""
    text = "\n".join(part for part in (episode.observation.text, extra) if part)
    tokens = prompt.chat.reply([{"role": role, "content": text}])
    spoken = episode.trajectory.tokens
    end = prompt.chat.eos[:1] if spoken and spoken[-1] not in prompt.chat.eos else ()
    return replace(episode, trajectory=episode.trajectory.observe((*end, *tokens)))


def play(
    prompt: Prompt,
    make: Callable[[], Environment],
    max_turns: int,
    timeout: float = 60.0,
    turn_tokens: int | None = None,
    role: str = "user",
) -> Subprogram:
    """One rollout of an agent, as a program of its own. Returns its trajectory, with `meta` of `summary`.

    It ends when the environment is done, after `max_turns` or the plan's limit, or when nothing more fits: an
    observation that would leave no room for an answer is not added.

    Args:
        make: a new environment.
        max_turns: of the agent; the plan's limit holds if it is lower.
        timeout: seconds of one call of the environment.
        turn_tokens: most tokens of one turn.
        role: of the messages the environment's observations become.
    """
    environment = make()
    try:
        episode = yield from open_episode(prompt, environment, timeout)
        while True:
            trajectory = yield from generate(episode.trajectory, turn_tokens)
            episode = yield from act(prompt, episode, trajectory, timeout)
            if episode.done or episode.turns >= prompt.turns(max_turns):
                break
            following = reply(prompt, episode, role=role)
            if not prompt.room(following.trajectory):
                break
            episode = following
        return finish(episode)
    finally:
        environment.close()


def finish(episode: Episode, **meta: Any) -> Trajectory:
    """The trajectory of an episode that is over, with what reward functions and metrics may want of it as `meta`:
    `score` (of the environment; if it has no `score()`, the sum of its rewards of turns; NaN if it gave none or is
    broken), `turns`, `done`, `error`."""
    score = getattr(episode.environment, "score", None)
    rewards = [turn.reward for turn in episode.trajectory.turns if not math.isnan(turn.reward)]
    value = math.nan
    if not episode.broken and (callable(score) or rewards):
        value = float(score() if callable(score) else sum(rewards))
    done = episode.observation.done and not episode.broken
    return episode.trajectory.noted(score=value, turns=episode.turns, done=done, error=episode.broken, **meta)
