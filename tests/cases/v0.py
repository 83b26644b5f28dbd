"""`v0` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import draw

CASE = Case(
    effects=Effects(
        values={"prior": [lambda prompts, context: [draw(p) for p in prompts]], "prior_column": ["score"]},
        settings=({}, {"prior": "column", "prior_column": "rate"}),
        params={"max_rollouts": 5},
    )
)
