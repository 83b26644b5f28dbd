"""`adhint_advantages` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import hinted
from rl_plugins.testing.contract.effects import World

CASE = Case(prepare=hinted, effects=Effects(World(prepare=hinted, n=8)))
