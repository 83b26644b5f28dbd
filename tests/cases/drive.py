"""`drive` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import harder_and_easier
from rl_plugins.testing.contract.effects import World

CASE = Case(
    effects=Effects(
        World(prepare=harder_and_easier),
        values={"rollouts": [(2,)], "max_tokens": [(3,)], "sizes": [(0.5,)], "batches": [(3,)]},
        settings=(
            {"sizes": (0.5,), "batches": ()},
            {"sizes": (0.2,), "batches": ()},
            {"sizes": (1.0, 0.5), "batches": (4,)},
        ),
    )
)
