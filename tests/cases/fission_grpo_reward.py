"""`fission_grpo_reward` in the contract test."""

from __future__ import annotations

from typing import Any

from cases import Case, Effects
from cases.worlds import THREE, several_rewards
from rl_plugins.testing.contract.effects import World

PARAMS: dict[str, Any] = {"format": "format", "correctness": "accuracy"}

CASE = Case(
    params=PARAMS,
    prepare=lambda r: r.replace(reward_names=("format", "accuracy")),
    effects=Effects(
        World(prepare=several_rewards(THREE), facts={"reward_names": THREE}),
        {"format": ["other"], "correctness": ["other"], "length": ["length"]},
        params=PARAMS,
    ),
)
