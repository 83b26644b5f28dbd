"""`rubric` in the contract test."""

from __future__ import annotations

from typing import Any

from cases import Case, Effects
from cases.worlds import NOWHERE, draw
from rl_plugins.testing.contract.effects import World

RUBRIC = ("2: right", "-1: rude")


def met(prompt: Any, criterion: Any, completion: Any) -> float:
    return draw(str(prompt), str(criterion), completion)


CASE = Case(
    params={"judge": met, "criteria": RUBRIC},
    effects=Effects(
        World(prepare=lambda r: r.replace(meta={**r.meta, "rubrics": [["1: short"]] * len(r)})),
        {"judge": [lambda prompt, criterion, completion: 0], "judge_url": ["http://127.0.0.1:8/v1"]}
        | {"judge_key_env": ["PATH"], "judge_batch_size": [2], "judge_template": ["{prompt}{criterion}{completion}"]}
        | {"prompt_column": ["answer"], "criteria": [("1: right",)], "criteria_column": ["rubrics"]},
        (
            {},
            {"criteria": (), "criteria_column": "rubrics"},
            {"judge": None, "judge_url": NOWHERE, "judge_model": "m", "judge_retries": 0},
        ),
        {"judge": met, "criteria": RUBRIC},
    ),
)
