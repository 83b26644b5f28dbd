"""Prompt-GDRO and Rollout-GDRO (arXiv 2601.19280): weights and rollouts by bins of difficulty.

Two methods without a bundle, for the paper does not couple them.
"""

from __future__ import annotations

from rl_plugins.methods.gdro.prompt import GdroPrompt
from rl_plugins.methods.gdro.rollout import GdroRollout, allocate

__all__ = ["GdroPrompt", "GdroRollout", "allocate"]
