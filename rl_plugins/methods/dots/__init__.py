"""DOTS and the bundle with rollout replay (arXiv 2506.05316)."""

from __future__ import annotations

from rl_plugins.methods.dots.files import load_adapter, save_adapter, save_embeddings
from rl_plugins.methods.dots.method import Dots
from rl_plugins.methods.dots.training import train_adapter

__all__ = ["Dots", "load_adapter", "save_adapter", "save_embeddings", "train_adapter"]
