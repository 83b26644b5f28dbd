"""`arrol` in the contract test."""

from __future__ import annotations

from typing import Any

from cases import Case, Effects
from cases.worlds import draw
from rl_plugins.testing.contract.effects import World


def head_features(r: Any) -> Any:
    size = 14

    def note(i: int) -> dict[str, Any]:
        return {"features": [draw(r.batch, i, k) for k in range(size)], "keep": 0.05 + 0.95 * draw(i), "q": None}

    return r.replace(meta={**r.meta, "arrol": [note(i) for i in range(len(r))]})


CASE = Case(
    params={"cold_start": 1},
    # what its own program notes of every rollout
    prepare=lambda r: r.replace(
        meta={
            **r.meta,
            "arrol": [
                {"features": [n / 9, (n % 7) / 7], "keep": 0.5 + n % 2 / 2, "q": None} for n in r.length.tolist()
            ],
        }
    ),
    effects=Effects(
        World(prepare=head_features, n=8),
        {"features": [lambda contexts: [[draw(c, k) for k in range(14)] for c in contexts]]},
        ({"detect_tokens": 4},),
        {"cold_start": 1, "min_keep": 1},
    ),
)
