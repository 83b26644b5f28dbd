"""`fapo` in the contract test."""

from __future__ import annotations

from typing import Any

from cases import Case, Effects
from cases.worlds import NOWHERE, draw, harder_and_easier
from rl_plugins.testing.contract.effects import World


def flaw(prompt: Any, answer: Any, completion: Any) -> int:
    return int(draw(str(prompt), str(answer), completion) * 3) - 1


CASE = Case(
    params={"judge": lambda prompt, answer, completion: len(completion) % 3 - 1},
    effects=Effects(
        World(prepare=harder_and_easier),
        {"judge": [lambda prompt, answer, completion: 0], "judge_url": ["http://127.0.0.1:8/v1"]}
        | {"judge_key_env": ["PATH"], "judge_batch_size": [2]}
        | {"prompt_column": ["answer"], "answer_column": [None, "prompt"]},
        ({}, {"judge": None, "judge_url": NOWHERE, "judge_model": "m", "judge_retries": 0}),
        {"judge": flaw},
        elsewhere=("judge_template",),
    ),
)
