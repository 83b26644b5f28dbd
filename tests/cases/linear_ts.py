"""`linear_ts` in the contract test."""

from __future__ import annotations

from cases import Case, Effects

CASE = Case(
    params={"column": "domain"},
    effects=Effects(
        values={"column": ["answer"], "context": [("constant", "progress")]},
        settings=({}, {"draws": 7}),
        params={"column": "domain"},
    ),
)
