"""`gdro_rollout` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import harder_and_easier
from rl_plugins.testing.contract.effects import World

CASE = Case(
    effects=Effects(
        World(prepare=harder_and_easier),
        {"n_max": [5]},
        settings=({}, {"edges": ()}, {"arm_sign": "paper", "baseline": "none"}),
        elsewhere=("price_rate",),  # plans of equal groups are always met
    ),
)
