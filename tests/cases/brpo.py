"""`brpo` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import NOWHERE, judge
from rl_plugins.testing.contract.effects import World

CASE = Case(
    params={"judge": lambda prompt, a, b: "A" if a > b else "B"},
    effects=Effects(
        World(),
        {"judge": [lambda prompt, a, b: "A"], "judge_url": ["http://127.0.0.1:8/v1"], "judge_key_env": ["PATH"]}
        | {"judge_template": ["{prompt}{a}{b}"], "judge_batch_size": [2]},
        ({}, {"judge": None, "judge_url": NOWHERE, "judge_model": "m", "judge_retries": 0}),
        {"judge": judge},
    ),
)
