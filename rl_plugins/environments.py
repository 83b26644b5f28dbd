"""Environments that agents act in, and their form as tools of TRL's `environment_factory`.

An environment is any class with the three methods of :class:`Environment`. Rollout programs use it as it is;
:func:`as_tools` makes of it what TRL's `GRPOTrainer(environment_factory=...)` takes.
"""

from __future__ import annotations

import inspect
import math
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

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
    """What an agent acts in. Calls are synchronous, one at a time, each perhaps from another thread.

    An environment may also have `score() -> float`, the reward of the episode so far.
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


class _Tools:
    """An environment as an object with tools. `rl_plugins_turns` has a record per call of `act` since `reset`."""

    _factory: Callable[[], Environment]

    def __init__(self) -> None:
        self._environment = type(self)._factory()
        self._last = Observation("", done=True)
        self.rl_plugins_turns: list[TurnRecord] = []
        weakref.finalize(self, self._environment.close)  # TRL keeps its environments and closes none

    def reset(self, **columns: Any) -> str:
        """Begin the episode of a row.

        Returns:
            What TRL appends to the last message of the prompt: the first observation, or nothing where the prompt ends
            with it already.
        """
        self._last = self._environment.reset(columns)
        self.rl_plugins_turns = []
        return "" if _prompt_text(columns.get("prompt")).endswith(self._last.text) else self._last.text

    def _act(self, action: str) -> str:
        before = self._last
        if before.done:  # TRL goes on calling tools for as long as the agent asks for them
            self.rl_plugins_turns.append(TurnRecord(before.anchor, math.nan, False))
            return ENDED
        try:
            self._last = self._environment.act(action)
        except Exception:  # TRL shows its message to the agent
            self.rl_plugins_turns.append(TurnRecord(before.anchor, math.nan, False))
            raise
        self.rl_plugins_turns.append(TurnRecord(before.anchor, self._last.reward, self._last.valid))
        return self._last.text


class _ScoredTools(_Tools):
    def get_reward(self) -> float:
        """The reward of the episode so far."""
        return float(self._environment.score())  # type: ignore[attr-defined]


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
    """
    if isinstance(factory, type):
        kind = factory
    else:
        sample = factory()
        kind = type(sample)
        if isinstance(sample, Environment):
            sample.close()
    missing = [name for name in ("reset", "act", "close") if not callable(getattr(kind, name, None))]
    if missing:
        raise TypeError(
            f"{kind.__name__} is no environment: it has no method {' and no method '.join(missing)}. An environment "
            "has reset(columns), act(action) and close(), see rl_plugins.environments.Environment."
        )

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


def _prompt_text(prompt: Any) -> str:
    """Text of the last message of a prompt: a string, or messages whose content is a string or a list of parts."""
    if isinstance(prompt, list) and prompt:
        prompt = prompt[-1].get("content")
    if isinstance(prompt, list):
        prompt = "".join(part.get("text") or "" for part in prompt)
    return prompt if isinstance(prompt, str) else ""
