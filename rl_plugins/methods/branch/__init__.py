"""BranchGRPO (arXiv 2509.06040): rollouts that form a tree, advantages of its nodes, and pruning."""

from __future__ import annotations

from rl_plugins.methods.branch.advantages import BranchAdvantages
from rl_plugins.methods.branch.pruning import BranchPruning
from rl_plugins.methods.branch.text import BranchTextRollout

__all__ = ["BranchAdvantages", "BranchPruning", "BranchTextRollout"]
