"""Environments that others made. The guide docs/guides/environments.md shows this file."""

from __future__ import annotations

from typing import Any

from rl_plugins.environments import Gymnasium, TextWorld, TRLTools, Verifiers


class Lake(Gymnasium):
    id = "FrozenLake-v1"
    options = {"is_slippery": False}
    actions = ("left", "down", "right", "up")


class House(TextWorld):
    rewards = "intermediate"


class Wordle(Verifiers):
    id = "wordle"
    arguments = {"use_think": False}


class HighLow:
    """An environment as TRL's `environment_factory` takes it: its public methods are tools."""

    def reset(self, secret: int, **row: Any) -> str:
        self.secret, self.reward, self.done = secret, 0.0, False
        return "Find the number between 0 and 99."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: the guess.
        """
        self.done = number == self.secret
        self.reward = float(self.done)
        return "right" if self.done else "higher" if number < self.secret else "lower"

    def get_reward(self) -> float:
        return self.reward


class HighLowGame(TRLTools):
    factory = HighLow


def score(completions: list[Any], score: list[float], **columns: Any) -> list[float | None]:
    """The score of the environment, None where it broke."""
    return [None if s != s else s for s in score]
