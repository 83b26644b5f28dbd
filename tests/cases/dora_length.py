"""`dora_length` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from rl_plugins.testing.contract.effects import World

CASE = Case(
    effects=Effects(
        World(n=8), {"shares": [(0.3, 0.6, 1.0)], "window": [4]}, ({"window": 8}, {"window": 8, "shares": (0.1, 0.2)})
    )
)
