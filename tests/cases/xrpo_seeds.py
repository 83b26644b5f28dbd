"""`xrpo_seeds` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import draw

CASE = Case(
    effects=Effects(
        values={
            "embed": [lambda texts: [[draw(t, k) for k in range(4)] for t in texts]],
            "prompt_column": ["question"],
            "template": ["{examples} {problem}"],
            "max_characters": [1],
        },
        settings=({}, {"corpus_size": 3}),
    )
)
