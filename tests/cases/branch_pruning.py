"""`branch_pruning` in the contract test."""

from __future__ import annotations

from typing import Any

from cases import Case, Effects
from cases.worlds import in_trees
from rl_plugins.testing.contract.effects import World


def deep_trees(r: Any) -> Any:
    """Two rollouts share a token, then each has a node for every token."""
    ways = [
        {"nodes": [0, 1 + i // 2, *range(99 + 9 * i, 99 + 9 * i + n)], "stops": [*range(n + 2)]}
        for i, n in zip(r.rollout.tolist(), r.length.tolist(), strict=True)
    ]
    return r.replace(meta={**r.meta, "branches": ways})


CASE = Case(
    prepare=in_trees,
    effects=Effects(
        World(prepare=deep_trees),
        {"depths": [(3,)], "interval": [2], "stop_depth": [3, 0], "until": [0.5], "ratio": [1.0]},
        ({}, {"depths": (3,), "interval": 2}, {"width": "extreme"}, {"code_compat": True}),
    ),
)
