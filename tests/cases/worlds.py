"""Worlds in which methods are tried, and what several cases share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from rl_plugins.kit.agents import Observation
from rl_plugins.testing.engine import EOS

NOWHERE = "http://127.0.0.1:9/v1"
THREE = ("accuracy", "format", "length", "other")
TURNS = ('x{"arguments": "ab"}', 'yy{"arguments": "ac"}', 'x{"name": "d", "arguments": "ab"}', "stop")


def hinted(r: Any) -> Any:
    """Every second row begins with a hint of two tokens."""
    return r.replace(meta={**r.meta, "adhint": [[0, 2 * (n % 2)] for n in r.length.tolist()]})


def in_trees(r: Any) -> Any:
    """Every group is a tree: two rollouts share a token, and each has an end of its own."""
    ways = [
        {"nodes": [0, 1 + i // 2, 100 + 10 * i + k], "stops": [0, 1, max(n, 1)]}
        for i, k, n in zip(r.rollout.tolist(), r.index.tolist(), r.length.tolist(), strict=True)
    ]
    return r.replace(meta={**r.meta, "branches": ways})


def draw(*what: Any) -> float:
    """A number in [0, 1) that depends on these alone."""
    return int.from_bytes(hashlib.sha256(repr(what).encode()).digest()[:4], "big") / 2**32


def harder_and_easier(rollouts: Any) -> Any:
    """Right and wrong rollouts; of every four prompts in a row two are hard."""
    of_row = zip(rollouts.prompt_index.tolist(), rollouts.rollout.tolist(), strict=True)
    right = [
        float(draw(prompt, number, rollouts.batch) < (0.02, 0.1, 0.7, 0.9)[prompt % 4]) for prompt, number in of_row
    ]
    return rollouts.replace(reward=torch.tensor(right, dtype=torch.float64))


def writes(*turns: str) -> Callable[[str], Mapping[str, float]]:
    """A model that writes one of these texts in each turn, sure of it but where they part."""

    def model(text: str) -> Mapping[str, float]:
        place = text.rindex(">") + 1
        begun, chances = text[place:], dict[str, float]()
        for i, turn in enumerate(turns):
            if turn.startswith(begun):
                letter = turn[len(begun) : len(begun) + 1] or EOS
                chances[letter] = chances.get(letter, 0.0) + 0.05 + draw(text[:place], i)
        return chances or {EOS: 1.0}

    return model


class Bench:
    """An environment whose answers depend on the action and on how many came before."""

    def __init__(self) -> None:
        self.taken = 0

    def reset(self, columns: Any) -> Observation:
        return Observation("go", state="start")

    def act(self, action: str) -> Observation:
        self.taken += 1
        chance = draw(action, self.taken)
        text = "NameError" if chance > 0.6 else "ok" if chance > 0.3 else "Tool call success"
        return Observation(text, chance, done=chance < 0.15, valid=chance < 0.35, state=self.taken % 3)

    def score(self) -> float:
        return float(self.taken)

    def close(self) -> None:
        pass


class Desk(Bench):
    """Another one."""

    def act(self, action: str) -> Observation:
        return super().act(f"{action}!")


def several_rewards(names: Sequence[str]) -> Callable[[Any], Any]:
    def prepare(r: Any) -> Any:
        others = [torch.tensor([float(draw(n, i, g) < 0.5) for i, g in enumerate(r.group.tolist())]) for n in names[1:]]
        rewards = torch.stack([r.reward, *(o.double() for o in others)], dim=1)
        return r.replace(rewards=rewards, reward_names=tuple(names), reward_weights=torch.ones(len(names)).double())

    return prepare


def judge(prompt: Any, a: Any, b: Any) -> tuple[float, float]:
    return draw(a, b, 1), draw(b, a, 2)  # it prefers places
