"""`rtv_pdr` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import Bench, writes
from rl_plugins.testing.contract.effects import World

CASE = Case(
    effects=Effects(
        World(model=writes("Best: 1", "Best: 2", "1 or 2", "aa"), max_tokens=100),
        {
            "environment": [Bench],
            "summarizer": [lambda problem, attempt: attempt[::-1]],
            "judge": [lambda problem, summaries: 1 + len(summaries[0]) % 2],
        },
        ({}, {"training": "refined"}, {"training": "hard"}),
    )
)
