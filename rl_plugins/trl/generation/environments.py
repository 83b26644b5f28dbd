"""Environments as tools of TRL's `environment_factory`: one tool, `act`, and a record of every turn."""

from __future__ import annotations

import inspect
import logging
import math
import weakref
from collections.abc import Callable
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.requests import Call
from rl_plugins.kit.agents.environment import (
    ENDED,
    Environment,
    Observation,
    TurnRecord,
    check_environment,
    missing_methods,
    observed,
    scored,
)
from rl_plugins.kit.prompts import as_text
from rl_plugins.kit.threads import answer_of, run_calls

logger = logging.getLogger("rl_plugins")


class _Tools:
    """An environment as an object with tools. `rl_plugins_turns` has a record per call of `act` since `reset`. Where it
    cannot be made, reset or scored, the episode has no reward."""

    _factory: Callable[[], Environment]

    def __init__(self) -> None:
        self._last = Observation("", done=True)
        self._broken = ""
        self._wrong: ConfigError | None = None  # TRL shows the agent whatever a tool raises, so it is raised again
        self.rl_plugins_turns: list[TurnRecord] = []
        self._environment = self._made()

    def reset(self, **columns: Any) -> str:
        """Begin the episode of a row.

        Returns:
            What TRL appends to the last message of the prompt: the first observation, or nothing where the prompt ends
            with it already.
        """
        if self._wrong is not None:
            raise self._wrong
        self._last, self._broken, self.rl_plugins_turns = Observation("", done=True), "", []
        self._environment = self._environment or self._made()
        first = self._answer("reset", columns)
        if self._broken:
            return ""
        self._last = observed(self._environment, "reset", first)
        prompt = columns.get("prompt")
        said = as_text(prompt[-1].get("content") if isinstance(prompt, list) and prompt else prompt or "")
        return "" if said.endswith(self._last.text) else self._last.text

    def _made(self) -> Any:
        environment = self._answer("")
        if environment is not None:
            weakref.finalize(self, answer_of, environment.close)  # TRL keeps its environments and closes none
        return environment

    def _answer(self, method: str, *args: Any) -> Any:
        """What a method, or without a name the factory, answers. None if it fails: then the episode is broken."""
        if self._broken:
            return None
        name = f"the environment {type(self).__name__}"
        function = getattr(self._environment, method) if method else type(self)._factory
        (called,) = run_calls([Call(function, args, name=name)])
        if called.error:
            self._broken = called.error
            logger.warning("an episode has no reward: %s of %s failed: %s", method or "making", name, called.error)
        return called.value

    def _act(self, action: str) -> str:
        before = self._last
        if before.done:  # TRL goes on calling tools for as long as the agent asks for them
            self.rl_plugins_turns.append(TurnRecord(before.anchor, math.nan, False))
            return ENDED
        try:
            self._last = observed(self._environment, "act", answer_of(self._environment.act, action))
        except Exception as e:  # TRL shows its message to the agent
            self.rl_plugins_turns.append(TurnRecord(before.anchor, math.nan, False))
            self._wrong = e if isinstance(e, ConfigError) else None
            raise
        self.rl_plugins_turns.append(TurnRecord(before.anchor, self._last.reward, self._last.valid))
        return self._last.text


class _ScoredTools(_Tools):
    def get_reward(self) -> float:
        """The reward of the episode so far."""
        if self._wrong is not None:
            raise self._wrong
        return scored(self._answer("score"))[0]


def as_tools(factory: Callable[[], Environment]) -> type:
    """A class for TRL's `environment_factory`, whose one tool is `act(action: str) -> str`.

    If the environment has a method `score`, the class has `get_reward`, which TRL adds to the reward functions under
    the environment's name. Instances record their turns in `rl_plugins_turns`, a list of :class:`TurnRecord`.

    The tool is described by the docstring of the environment's own `act` if that has an entry `action:` under `Args:`,
    else in general terms.

    Args:
        factory: makes an environment, without arguments: a class or a function.

    Raises:
        TypeError: what it makes is no environment.
        ConfigError: its methods say that they return no observation.
    """
    if isinstance(factory, type):
        kind = factory
    else:
        sample = factory()
        kind = type(sample)
        if isinstance(sample, Environment):
            answer_of(sample.close)
    missing = missing_methods(kind)
    if missing:
        raise TypeError(
            f"{kind.__name__} is no environment: it has no method {' and no method '.join(missing)}. An environment "
            "has reset(columns), act(action) and close(), see rl_plugins.kit.agents.Environment."
        )

    check_environment(kind)
    base: type[_Tools] = _ScoredTools if callable(getattr(kind, "score", None)) else _Tools

    class Tools(base):  # type: ignore[misc, valid-type]
        def act(self, action: str) -> str:
            return str(self._act(action))

    described = inspect.getdoc(kind.act) or ""  # type: ignore[attr-defined]
    Tools.act.__doc__ = described if "Args:" in described and "action:" in described else _ACT
    Tools.__name__ = Tools.__qualname__ = kind.__name__
    Tools.__doc__ = kind.__doc__
    Tools._factory = staticmethod(factory)
    return Tools


_ACT = """Act in the environment.

Args:
    action: What to do, in the words of the task.

Returns:
    What happens.
"""
