"""Environments that agents act in: any class with the three methods of :class:`Environment`.

Rollout programs use it as it is; `rl_plugins.trl.as_tools` makes of it what TRL's
`GRPOTrainer(environment_factory=...)` takes.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, get_type_hints, runtime_checkable

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.kit.prompts import as_text
from rl_plugins.kit.services import number

ENDED = "The episode has ended."


@dataclass(frozen=True)
class Observation:
    """What an environment shows an agent.

    Attributes:
        text: what the agent reads.
        reward: of the action that led here, NaN if the environment gave none.
        done: the episode has ended.
        valid: False if the action was not understood or failed; `text` says why.
        state: what tells this state of the environment from others, where rollouts that meet the same state are
            compared (text, numbers, None, lists or mappings of those); None: `text`.
    """

    text: str
    reward: float = math.nan
    done: bool = False
    valid: bool = True
    state: Any = None

    @property
    def anchor(self) -> Any:
        """`state`, or `text` where there is none."""
        return self.text if self.state is None else self.state


@runtime_checkable
class Environment(Protocol):
    """What an agent acts in. Calls come one at a time, each perhaps from another thread; any may be `async def`.

    An environment may also have `score() -> float`, the reward of the episode so far (None: it has none); without it,
    the sum of the rewards of its observations counts. Its class may have `rows(n)`, dataset rows to try it with:
    `rl-plugins check` uses them. It may have a class method `check()`, which is called before training and raises
    `ConfigError` where no episode could be played.

    One whose constructor or method raises, takes too long or answers something else is broken: its episode ends, and
    has no score.
    """

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        """Begin the episode of a row of the data set. One object is reset again and again."""
        ...

    def act(self, action: str) -> Observation:
        """Take what the agent wrote in its turn. An action that makes no sense is an observation with `valid=False`."""
        ...

    def close(self) -> None:
        """Release what the environment holds; called more than once without harm."""
        ...


METHODS = ("reset", "act", "close")
_NO_OBSERVATION = (str, bytes, int, float, bool, tuple, list, dict, type(None))
_ALLOWED = "Observation(text, reward, done, valid, state) of rl_plugins.kit.agents, of which only `text` must be given"


def missing_methods(environment: Any) -> list[str]:
    """Methods of an environment that it, or its class, lacks."""
    return [name for name in METHODS if not callable(getattr(environment, name, None))]


def check_methods(environment: Any, name: str) -> None:
    """
    Raises:
        ConfigError: it is no environment.
    """
    if missing := missing_methods(environment):
        raise ConfigError(
            f"the environment {name} has no method {' and no method '.join(missing)}. An environment has "
            f"reset(columns), act(action) and close(), see rl_plugins.kit.agents.Environment."
        )


def check_environment(factory: Callable[..., Any] | None) -> None:
    """Refuses what is known not to make environments: a class that lacks a method, one whose `reset` or `act` is
    annotated to return something else than an `Observation`, and one whose own class method `check()` refuses it.

    Args:
        factory: a class; of a function nothing is known before it is called.

    Raises:
        ConfigError: it is no environment.
    """
    if not isinstance(factory, type):
        return
    check_methods(factory, factory.__name__)
    for name in METHODS[:2]:
        try:
            told = get_type_hints(getattr(factory, name)).get("return", Observation)
        except (NameError, TypeError, AttributeError):  # names that only a type checker sees
            continue
        if told in _NO_OBSERVATION:
            raise ConfigError(
                f"`{name}` of the environment {factory.__name__} says that it returns {told.__name__}. It must return "
                f"an {_ALLOWED}."
            )
    if inspect.ismethod(own := getattr(factory, "check", None)):
        own()


def observed(environment: Any, method: str, answer: Any) -> Observation:
    """What an environment answered, checked: with a text that every tokenizer takes, and a number as reward.

    Args:
        method: "reset" or "act".

    Raises:
        ConfigError: it is no `Observation`, or one with fields of other types.
    """
    name = f"`{method}` of the environment {type(environment).__name__}"
    if not isinstance(answer, Observation):
        raise ConfigError(f"{name} returned {shown(answer)} ({type(answer).__name__}). It must return an {_ALLOWED}.")
    if not isinstance(answer.text, (str, bytes)):
        raise ConfigError(f"{name} returned an Observation whose `text` is {shown(answer.text)}; it must be a text.")
    try:
        reward = math.nan if answer.reward is None else float(answer.reward)
    except (TypeError, ValueError, OverflowError):
        raise ConfigError(
            f"{name} returned an Observation whose `reward` is {shown(answer.reward)}; it must be a number, and NaN "
            f"where there is none."
        ) from None
    return replace(answer, text=as_text(answer.text), reward=reward)


def scored(answer: Any) -> tuple[float, str]:
    """The score an environment answered, NaN where it has none, and what is wrong with it, empty if nothing is."""
    try:
        return (math.nan if answer is None else number(allow_nan=True)(answer)), ""
    except ValueError as e:
        return math.nan, str(e)


@dataclass(frozen=True)
class TurnRecord:
    """One turn of an agent.

    Attributes:
        anchor: the state before the turn, see `Observation.anchor`.
        reward: of the turn's action, NaN if the environment gave none.
        valid: the action was understood and did not fail.
    """

    anchor: Any
    reward: float
    valid: bool
