"""`turn_control` in the contract test."""

from __future__ import annotations

from typing import Any

from cases import Case, Effects
from cases.worlds import TURNS, Bench, Desk, draw, writes
from rl_plugins.lab.demo.environments import Grid
from rl_plugins.testing.contract.effects import World


def episodes(r: Any) -> Any:
    turns = [n + r.batch for n in r.length.tolist()]
    reasons = [("done", "limit", "length", "error")[int(4 * draw(r.batch, i)) ** 2 // 3] for i in range(len(r))]
    return r.replace(meta={"turns": turns, "stop_reason": reasons, "extended": [False] * len(r)})


CASE = Case(
    params={"environment": "rl_plugins.lab.demo.environments:Grid", "calibration_episodes": 4},
    # episodes of 1 to 4 turns, the longest ones cut off
    prepare=lambda r: r.replace(
        meta={
            "turns": r.length.tolist(),
            "stop_reason": ["limit" if n > 3 else "done" for n in r.length.tolist()],
            "extended": [False] * len(r),
        },
    ),
    rows=Grid.rows(4),
    effects=Effects(
        World(model=writes(*TURNS), prepare=episodes, max_tokens=400),
        {"environment": [Desk], "limit": [2], "should_extend": [lambda environment: environment.taken % 2 == 0]}
        | {
            "window": [4],
            "min_turns": [9],
            "last_percentile": [52],
            "role": ["assistant"],
            "reminder": ["{remaining}"],
            "extension_text": ["{extension}"],
        },
        (
            {"calibration_episodes": 4},
            {"calibration_episodes": 4, "calibration": "rolling", "update_every": 1},
            {"limit": 2, "remind_from": 1},
            {"limit": 2, "strategy": "dynamic", "extension": 2},
        ),
        {"environment": Bench},
    ),
)
