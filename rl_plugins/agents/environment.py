"""Environments that agents act in: any class with the three methods of :class:`Environment`.

Rollout programs use it as it is; `rl_plugins.environments.as_tools` makes of it what TRL's
`GRPOTrainer(environment_factory=...)` takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
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
