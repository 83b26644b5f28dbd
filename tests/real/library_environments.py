"""Small environments of the libraries, as users write them, for the embedded policy; and one that is any of them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from datasets import Dataset

from rl_plugins.environments import Gymnasium, TextWorld, TRLTools, Verifiers
from rl_plugins.kit.agents import Observation


class Cliff(Gymnasium):
    id = "CliffWalking-v1"
    actions = tuple("abcd")
    task = "go"

    def describe(self, observation: Any) -> str:
        return str(observation)  # the drawing is long for the embedded policy


class House(TextWorld):
    commands = "numbered"
    rewards = "intermediate"
    task = "play"

    def _observed(self, text: str, **fields: Any) -> Observation:  # short for the embedded policy
        return replace(super()._observed(text, **fields), text=f"{len(self._state.admissible_commands)} commands")

    def score(self) -> float:
        return super().score() + 0.1 * (self._state.last_command == "inventory")


def number_env() -> Any:
    """A MultiTurnEnv as users of verifiers write them, with a parser, a stop condition and a clean-up."""
    import verifiers as vf

    class Numbers(vf.MultiTurnEnv):
        cleaned = 0

        async def setup_state(self, state):
            state["guesses"] = []
            return state

        async def env_response(self, messages, state, **kwargs):
            digit = re.search(r"\d", messages[-1].content or "")
            if digit is None:
                return [vf.UserMessage(content="a digit")]
            state["guesses"].append(int(digit[0]))
            if state["guesses"][-1] == int(state["answer"]):
                state["final_env_response"] = [vf.UserMessage(content="right")]
                return state["final_env_response"]
            return [vf.UserMessage(content="higher" if state["guesses"][-1] < int(state["answer"]) else "lower")]

        @vf.stop
        async def repeated(self, state):
            return len(set(state["guesses"])) < len(state["guesses"])

        @vf.cleanup
        async def count(self, state):
            type(self).cleaned += 1

    def found(answer, state):
        return float(int(answer) in state["guesses"])

    def tried(completion, state):
        return len(state["guesses"])

    rows = [{"question": "guess", "answer": str(i), "info": {"index": i}} for i in range(8)]
    rubric = vf.Rubric(funcs=[found, tried], weights=[1.0, 0.1])
    return Numbers(dataset=Dataset.from_list(rows), rubric=rubric, system_prompt="numbers", max_turns=4)


class Numbers(Verifiers):
    make = classmethod(lambda cls: number_env())


class GuessEnv:
    """As the documentation of TRL writes environments."""

    def __init__(self):
        self.reward, self.done = 0.0, False

    def reset(self, secret, **row):
        self.secret, self.reward, self.done, self.turns = secret, 0.0, False, 0
        return "guess"

    def guess(self, digit: str) -> str:
        """Guess the digit.

        Args:
            digit: the guess.
        """
        if self.done:
            raise ValueError("The game is over.")
        self.turns += 1
        found = re.search(r"\d", digit)
        if found is None:
            raise ValueError("That is no digit.")
        self.reward = 1 - abs(int(found[0]) - self.secret) / 10
        self.done = int(found[0]) == self.secret or self.turns == 4
        return "higher" if int(found[0]) < self.secret else "lower"

    async def get_reward(self) -> float:
        return self.reward


class Guess(TRLTools):
    factory = GuessEnv
    plain = "guess"

    @staticmethod
    def rows(n: int) -> list[dict[str, Any]]:
        return [{"prompt": [{"role": "user", "content": "play"}], "secret": i % 10} for i in range(n)]


KINDS = {kind.__name__: kind for kind in (Cliff, House, Numbers, Guess)}


class OneOfThem:
    """The environment that the row's column `kind` names. Scores are noted in the folder of a run of verl."""

    def reset(self, columns: Mapping[str, Any]) -> Observation:
        self.kind = str(columns["kind"])
        self.played = KINDS[self.kind]()
        return self.played.reset(columns)

    def act(self, action: str) -> Observation:
        return self.played.act(action)

    def score(self) -> float:
        value = float(self.played.score())
        with (Path(os.environ["RL_PLUGINS_TEST_OUT"]) / "scores.jsonl").open("a") as file:
            file.write(json.dumps([self.kind, value]) + "\n")
        return value

    def close(self) -> None:
        if played := vars(self).pop("played", None):
            played.close()
