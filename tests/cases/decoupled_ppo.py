"""`decoupled_ppo` in the contract test."""

from __future__ import annotations

from cases import Case, Effects

CASE = Case(
    # generated weights are close to 1
    effects=Effects(values={"lower": [1.02]}, settings=({"upper": 1.05}, {"upper": 1.1, "level": "sequence"})),
)
