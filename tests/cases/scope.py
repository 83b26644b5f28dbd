"""`scope` in the contract test."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cases import Case, Effects
from cases.worlds import draw, writes
from rl_plugins.testing.contract.effects import World


def last_is_worst(messages: Any, steps: Sequence[str], columns: Any) -> list[float]:
    """The longer the right part, the lower the mean."""
    return [0.6] * (len(steps) - 1) + [-float(len(steps) ** 2)]


def prepare(r: Any) -> Any:
    return r.replace(meta={**r.meta, "scope": [[1, 3] if n % 2 else None for n in r.length.tolist()]})


CASE = Case(
    params={"prm": lambda messages, steps, columns: [1.0] * len(steps)},
    prepare=prepare,
    effects=Effects(
        World(
            prepare=prepare,
            model=writes("aa;bb;cc;dd", "ab;ba;ca", "aa;cb;d;e", "ba;bc;bd", "bb;cc;dd", "ca;cc;aa;bb;dd"),
            reward=lambda text, columns: float(draw(text) < 0.4 or "right" in text),
            columns={"solution": "right;end"},
            max_tokens=60,
            n=8,
        ),
        {
            "prm": [lambda messages, steps, columns: [draw(s, 1) for s in steps]],
            "corrector": [lambda messages, text, columns: "right;end"],
            "separator": ["c"],
            "solution_column": ["answer"],
        },
        ({}, {"min_correct": 9}, {"success_threshold": 2.0, "prm": last_is_worst}),
        {"prm": lambda messages, steps, columns: [draw(s) for s in steps], "separator": ";", "min_prefix": 0.1}
        | {"min_step": 1},
    ),
)
