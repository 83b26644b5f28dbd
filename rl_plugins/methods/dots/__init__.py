"""DOTS (arXiv 2506.05316): prompts of medium predicted difficulty."""

from __future__ import annotations

from rl_plugins.methods.dots.files import (
    checked_embeddings,
    load_adapter,
    load_embeddings,
    save_adapter,
    save_embeddings,
)
from rl_plugins.methods.dots.method import Dots
from rl_plugins.methods.dots.training import steps_of, train_adapter

__all__ = [
    "Dots",
    "checked_embeddings",
    "load_adapter",
    "load_embeddings",
    "save_adapter",
    "save_embeddings",
    "steps_of",
    "train_adapter",
]
