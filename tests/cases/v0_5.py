"""`v0_5` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import draw

CASE = Case(
    effects=Effects(
        values={"prior": [lambda prompts, context: [draw(p) for p in prompts]], "prior_column": ["score"]}
        | {"prior_value": [0.25], "k_max": [3], "increment": [2]},
        settings=(
            {},
            {"prior": "column", "prior_column": "rate"},
            {"prior": "constant", "prior_value": 0.9},
        ),
        params={"k_init": 2, "k_max": 4, "cost": 0.0},
    )
)
