"""`training_free_grpo` in the contract test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cases import Case, Effects
from cases.worlds import NOWHERE, draw
from rl_plugins.testing.contract.effects import Beside, World


def advice(question: str) -> str:
    text = f"{draw(question):.12f}"
    operations = [
        {"operation": "ADD", "content": text, "option": "add", "experience": text},
        {"option": "merge", "merged_from": ["C0"]},
    ]
    return f"<Experiences>{text}</Experiences> ```json\n{json.dumps(operations)}\n```"


def library(folder: Path) -> dict[str, list[Any]]:
    """A file of experiences, and runs that only use it."""
    path = folder / "library.json"
    path.write_text(json.dumps({"format": 1, "experiences": {"G0": "look twice"}}))
    return {"library": [str(path)], "learn": [Beside(False, {"llm": None, "library": str(path)})]}


CASE = Case(
    params={
        "llm": lambda text: '<Experiences>a: b</Experiences> ```json\n[{"operation": "ADD", "content": "a: b"}]\n```'
    },
    effects=Effects(
        World(),
        {
            "llm": [lambda text: advice(text + " ")],
            "llm_url": ["http://127.0.0.1:8/v1"],
            "llm_key_env": ["PATH"],
            "library": [],  # files of the test
            "learn": [],
        },
        ({}, {"llm": None, "llm_url": NOWHERE, "llm_model": "m", "llm_retries": 0}),
        {"llm": advice},
        files=library,
    ),
)
