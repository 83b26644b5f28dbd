"""`cleaner` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import TURNS, Bench, Desk, writes
from rl_plugins.lab.demo.environments import Calculator
from rl_plugins.testing.contract.effects import World

CASE = Case(
    params={"environment": "rl_plugins.lab.demo.environments:Calculator", "marker": "["},
    rows=Calculator.rows(4),
    effects=Effects(
        World(model=writes(*TURNS), max_tokens=600),
        {
            "role": ["assistant"],
            "environment": [Desk],
            "marker": ['"'],
            "success_marker": ["ok"],
            "patterns": [("Name",)],
        },
        ({}, {"marker": '{"'}, {"gamma": 0.8}),
        {"environment": Bench, "marker": "{"},
    ),
)
