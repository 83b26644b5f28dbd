"""BranchGRPO (arXiv 2509.06040): rollouts that form a tree, advantages of its nodes, and pruning."""

from __future__ import annotations

from rl_plugins import Bundle

BRANCH_GRPO = Bundle(
    "branch_grpo",
    parts={
        "branch_rollout": {},
        "branch_advantages": {},
        "branch_pruning": {"depths": [15, 16, 17, 18, 19], "interval": 30, "stop_depth": 9, "width": "none"},
    },
    does="Samples images as a tree, gives every denoising step its own advantage, and prunes the update",
    problems=("few_rollouts",),
)
