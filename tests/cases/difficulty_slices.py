"""`difficulty_slices` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import harder_and_easier
from rl_plugins.testing.contract.effects import World

CASE = Case(
    effects=Effects(
        World(prepare=harder_and_easier),
        {"column": ["level"], "head": [1], "refresh": [3]},
        ({"refresh": 1}, {"refresh": 1, "heads": 2}, {"heads": 2, "refresh": 1, "decay": 0.5}, {"column": "level"}),
    )
)
