"""Rollout replay (arXiv 2506.05316): the method, and the buffer it keeps in its state."""

from __future__ import annotations

from rl_plugins.methods.rollout_replay.buffer import Buffer
from rl_plugins.methods.rollout_replay.method import RolloutReplay

__all__ = ["Buffer", "RolloutReplay"]
