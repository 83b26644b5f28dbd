"""`branch_advantages` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import in_trees
from rl_plugins.testing.contract.effects import World

CASE = Case(prepare=in_trees, effects=Effects(World(prepare=in_trees), {"clip": [0.5]}))
