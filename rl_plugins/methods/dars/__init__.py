"""DARS (arXiv 2508.13755): more rollouts for hard prompts."""

from __future__ import annotations

from rl_plugins.methods.dars.method import Dars
from rl_plugins.methods.dars.schedule import helping, served

__all__ = ["Dars", "helping", "served"]
