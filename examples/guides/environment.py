"""An environment: find a secret digit. The guide docs/guides/environment.md shows this file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from rl_plugins.kit.agents import Observation


class Guess:
    """A turn is a guess. The environment says whether the secret digit is higher or lower."""

    TURNS = 4

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        """Begins an episode. `columns` is the dataset row."""
        self.secret, self.turns, self.found = int(columns["secret"]), 0, False
        self.low, self.high = 0, 9
        return self._says("guess a digit")

    def act(self, action: str) -> Observation:
        """Takes the text of one turn."""
        self.turns += 1
        digit = re.search(r"\d", action)
        if digit is None:
            return self._says("write a digit", valid=False)
        guess = int(digit[0])
        if guess == self.secret:
            self.found = True
            return self._says("right", reward=1.0)
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
            return self._says("higher", reward=0.0)
        self.high = min(self.high, guess - 1)
        return self._says("lower", reward=0.0)

    def score(self) -> float:
        """The reward of the episode so far."""
        return float(self.found)

    def close(self) -> None:
        """Nothing is held."""

    @staticmethod
    def rows(n: int) -> list[dict[str, Any]]:
        """Dataset rows."""
        return [{"prompt": [{"role": "user", "content": "guess a digit"}], "secret": i % 10} for i in range(n)]

    def _says(self, text: str, **fields: Any) -> Observation:
        done = self.found or self.turns >= self.TURNS
        return Observation(text, done=done, state=f"{self.low}-{self.high}", **fields)


def score(completions: list[Any], score: list[float], **columns: Any) -> list[float | None]:
    """The score of the environment, which the agent loop puts into the column `score`; NaN if the environment broke."""
    return [None if s != s else s for s in score]
