"""What the three environments share: counting turns, summing rewards, and rows whose splits have no task in common."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from rl_plugins.kit.agents import Observation
from rl_plugins.lab.demo.tasks import MAX_ROWS, SPLITS, split_of

_MISSES = 500  # draws in a row that bring nothing new: the level has no more tasks


class DemoEnvironment(ABC):
    """A deterministic environment: what happens depends on the row's columns and the actions only.

    The prompt of a row is the first observation, and it tells one task from every other. Each action is rewarded with 0
    but where the class says otherwise; the last turn is done whatever comes of it.
    """

    LEVELS: ClassVar[tuple[int, ...]]
    MAX_TURNS: ClassVar[int]
    MAX_ACTION: ClassVar[int]
    """Tokens a turn may have, the end of the sequence included. Then no episode is longer than 256 tokens."""

    def __init__(self) -> None:
        self._turns, self._score, self._done = 0, 0.0, True

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        """Begin the episode of a row of `rows`. Columns other than the environment's own are not read."""
        self._turns, self._score, self._done = 0, 0.0, False
        self._begin(columns)
        return Observation(self.describe(columns), state=self._state())

    def act(self, action: str) -> Observation:
        """Take one turn.

        Raises:
            RuntimeError: the episode has ended or never began.
        """
        if self._done:
            raise RuntimeError(f"No episode of {type(self).__name__} is under way. Call reset(columns) before act.")
        text, reward, done, valid = self._take(action.strip())
        self._turns += 1
        self._score += reward
        self._done = done or self._turns >= self.MAX_TURNS
        return Observation(text, reward, self._done, valid, self._state())

    def score(self) -> float:
        """Reward of the episode so far, 0 to 1."""
        return self._score

    def close(self) -> None:
        """End the episode."""
        self._done = True

    @classmethod
    def rows(
        cls, n: int, seed: int = 0, split: str = "train", levels: Sequence[int] | None = None
    ) -> list[dict[str, Any]]:
        """`n` rows with `prompt` (one user message), `level` and the columns the environment reads.

        The rows depend on the arguments only, levels come in equal shares, and no task is in both splits. A task comes
        again only after all of its level and split that were found have come as often.

        Args:
            n: Number of rows, 1 to 100,000.
            seed: Selects the tasks and their order.
            split: "train" or "held_out".
            levels: Levels of difficulty to draw from; all when None.

        Raises:
            ValueError: an argument is out of its range.
        """
        levels = cls.LEVELS if levels is None else levels
        if not 1 <= n <= MAX_ROWS:
            raise ValueError(f"n is {n}, but a demo data set has 1 to {MAX_ROWS} rows. Ask for a number in that range.")
        if split not in SPLITS:
            raise ValueError(f"There is no split {split!r} of {cls.__name__}. Choose one of: {', '.join(SPLITS)}.")
        if not levels or len(set(levels)) != len(levels) or not set(levels) <= set(cls.LEVELS):
            raise ValueError(
                f"levels is {tuple(levels)}, but {cls.__name__} has the levels {cls.LEVELS}. Name at least one of "
                "them, each once."
            )
        rows = []
        for position, level in enumerate(levels):
            count = len(range(position, n, len(levels)))
            rng = random.Random(f"{cls.__name__}/{seed}/{split}/{level}")
            tasks = cls._distinct_tasks(rng, level, split, count)
            rows += [dict(tasks[i % len(tasks)]) for i in range(count)]
        random.Random(f"{cls.__name__}/{seed}/{split}/order").shuffle(rows)
        return rows

    @classmethod
    def expert(cls, columns: Mapping[str, Any]) -> list[str]:
        """Actions that solve the episode of a row with score 1."""
        actions, environment = [], cls.unwatched()
        done = environment.reset(columns).done
        while not done:
            actions.append(environment.advise())
            done = environment.act(actions[-1]).done
        return actions

    @classmethod
    def unwatched(cls) -> DemoEnvironment:
        """An environment for actions of our own making, without safeguards that take time."""
        return cls()

    @classmethod
    def draw(cls, rng: random.Random, level: int, split: str) -> dict[str, Any]:
        """A row of `level` from `split`, drawn with replacement."""
        while True:
            columns = cls._draw(rng, level)
            text = cls.describe(columns)
            if split_of(text) == split:
                return {"prompt": [{"role": "user", "content": text}], "level": level, **columns}

    @staticmethod
    @abstractmethod
    def describe(columns: Mapping[str, Any]) -> str:
        """The first observation: all the agent is told about the task."""

    @abstractmethod
    def advise(self) -> str:
        """The action an expert would take now."""

    @abstractmethod
    def stumble(self, rng: random.Random) -> str:
        """An action a careless agent might take now."""

    @staticmethod
    @abstractmethod
    def _draw(rng: random.Random, level: int) -> dict[str, Any]:
        """Columns of a random task."""

    @abstractmethod
    def _begin(self, columns: Mapping[str, Any]) -> None: ...

    @abstractmethod
    def _take(self, action: str) -> tuple[str, float, bool, bool]:
        """Text, reward, whether the episode ends, whether the action was valid."""

    @abstractmethod
    def _state(self) -> Any:
        """The same for the same situation of the same task."""

    @classmethod
    def _distinct_tasks(cls, rng: random.Random, level: int, split: str, count: int) -> list[dict[str, Any]]:
        tasks: dict[str, dict[str, Any]] = {}
        misses = 0
        while len(tasks) < max(count, 1) and misses < _MISSES:
            row = cls.draw(rng, level, split)
            text = row["prompt"][0]["content"]
            misses = misses + 1 if text in tasks else 0
            tasks.setdefault(text, row)
        return list(tasks.values())
