"""`echo_tree` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from rl_plugins.testing.contract.effects import World

CASE = Case(
    effects=Effects(
        World(n=8),
        {"max_branches": [2]},
        (
            {"entropy_delta_threshold": -1.0},
            {"entropy_delta_threshold": -1.0, "branch_threshold": 1.0},
            {"entropy_delta_threshold": -1.0, "alpha": 4.0},
            {"delta_upper": 0.2, "delta_rise_steps": 1},
            {"prune_threshold": 2.0},
            {"tail_threshold": 2.0, "tail_decline_steps": 1},
        ),
        {"logprob_top_k": 5, "confidence_top_k": 2, "entropy_high": 0.9, "entropy_low": 0.3}
        | {"branch_threshold": 1.5, "min_depth": 1, "alpha": 0.5, "max_branches": 5},
    )
)
