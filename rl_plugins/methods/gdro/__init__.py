"""Prompt-GDRO and Rollout-GDRO (arXiv 2601.19280): weights and rollouts by bins of difficulty.

The two methods have no bundle, because the paper does not combine them."""

from __future__ import annotations

from rl_plugins.methods.gdro.prompt import GdroPrompt
from rl_plugins.methods.gdro.rollout import GdroRollout, allocate

__all__ = ["GdroPrompt", "GdroRollout", "allocate"]
