"""`best_perm` in the contract test."""

from __future__ import annotations

from cases import Case, Effects

CASE = Case(
    params={"templates": ("{prompt}?", "{prompt}!")},
    effects=Effects(
        values={
            "prompt_column": ["answer"],
            "templates": [("{prompt} again",)],
            "hints_column": ["answer"],
            "hint_template": ["{hint}{prompt}"],
            "values": [(0.1, 0.9)],
        },
        settings=({"templates": ("{prompt}?", "{prompt}!")}, {"hints_column": "hints"}),
    ),
)
