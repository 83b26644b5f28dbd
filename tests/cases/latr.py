"""`latr` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import draw
from rl_plugins.testing.contract.effects import World

CASE = Case(
    effects=Effects(
        World(model=lambda text: {"a": 0.5, "b": 0.5} if draw(text) < 0.1 else {"c": 1.0}, n=6),
        {"eta_steps": [(0, 1, 2, 3, 4)]},
        ({"eta": (1.0,), "eta_steps": (0,)}, {}),
        {"tau_abs": 0.1, "tau_rel": 0.9, "lookahead": (2, 4)},
    )
)
