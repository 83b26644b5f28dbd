"""`branch_text_rollout` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from rl_plugins.testing.contract.effects import World

CASE = Case(effects=Effects(World(n=8), {"places": [(0, 2, 5)]}, ({"places": (0, 1, 2)},)))
