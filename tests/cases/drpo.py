"""`drpo` in the contract test."""

from __future__ import annotations

from typing import Any

from cases import Case, Effects
from cases.worlds import THREE, several_rewards
from rl_plugins.testing.contract.effects import World

PARAMS: dict[str, Any] = {"threshold": 0.5}

CASE = Case(
    params=PARAMS,
    effects=Effects(
        World(prepare=several_rewards(THREE), facts={"reward_names": THREE}),
        {"reward": ["format"]},
        params=PARAMS,
    ),
)
