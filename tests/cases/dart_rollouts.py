"""`dart_rollouts` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import harder_and_easier
from rl_plugins.testing.contract.effects import World

CASE = Case(effects=Effects(World(prepare=harder_and_easier), {"threshold": [0.3, 0.9], "n_min": [2, 3]}))
