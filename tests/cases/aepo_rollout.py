"""`aepo_rollout` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import Bench, Desk, writes
from rl_plugins.lab.demo.environments import Calculator
from rl_plugins.testing.contract.effects import World

CASE = Case(
    params={"environment": "rl_plugins.lab.demo.environments:Calculator"},
    rows=Calculator.rows(4),
    effects=Effects(
        World(model=writes("ab", "cd", "ce", "caba"), n=8, max_tokens=80),
        {"environment": [Desk], "role": ["assistant"]},
        params={"environment": Bench, "top_logprobs": 3},
    ),
)
