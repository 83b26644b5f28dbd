"""BranchGRPO (arXiv 2509.06040): rollouts that form a tree, advantages of its nodes, and pruning."""

from __future__ import annotations

from rl_plugins.method import Bundle, Measured
from rl_plugins.methods.branch.advantages import BranchAdvantages
from rl_plugins.methods.branch.paper import PAPER, PAPER_SETTINGS
from rl_plugins.methods.branch.pruning import BranchPruning
from rl_plugins.methods.branch.rollout import BranchRollout
from rl_plugins.methods.branch.text import BranchTextRollout

IMAGES = "branch_grpo-on-images-5-seeds"  # section of docs/evidence.md

BRANCH_GRPO = Bundle(
    name="branch_grpo",
    parts={
        "branch_rollout": {},
        "branch_advantages": {},
        "branch_pruning": {"depths": tuple(range(15, 20)), "interval": 30, "stop_depth": 9, "width": "none"},
    },
    paper=PAPER,
    about=(
        "For diffusion policies of 20 denoising steps: the samples of a prompt form a tree that splits in two at steps "
        "0, 3, 6 and 9 (`branch_rollout`). Every transition is compared with those of its depth and trained once "
        "(`branch_advantages`). A window of five depths is left out, which moves up by one in 30 batches "
        "(`branch_pruning`). For language models name `branch_text_rollout`, `branch_advantages` and `branch_pruning`."
    ),
    does="Samples images as a tree, gives every denoising step its own advantage, and prunes the update",
    problems=("few_rollouts",),
    measured=(
        Measured(
            "reward at equal passes of the model, minus flat groups (toy images)", "better", "+0.163 ± 0.059", IMAGES
        ),
        Measured(
            "reward at equal trained transitions, minus flat groups (toy images)", "better", "+0.229 ± 0.074", IMAGES
        ),
    ),
    paper_settings={"diffusion": PAPER_SETTINGS["diffusion"]},
)

__all__ = ["BRANCH_GRPO", "BranchAdvantages", "BranchPruning", "BranchRollout", "BranchTextRollout"]
