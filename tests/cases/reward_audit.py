"""`reward_audit` in the contract test."""

from __future__ import annotations

from cases import Case, Effects

CASE = Case(
    # their effect is on updates, whose KL generated batches do not have
    effects=Effects(
        elsewhere=(  # tests/methods/test_reward_audit.py: these act on reward functions, or on many groups
            *("preflight", "on_preflight", "on_training", "answer_column", "gold_renderer", "corrupter"),
            *("answer_extractor", "verifier", "verify_share", "wrong_answers", "max_rows", "tol", "tol_stochastic"),
            *("tau", "delta", "declared_prompt_features", "n_min", "alpha", "source_column", "allow_change"),
        )
    ),
)
