"""AReaL (arXiv 2505.24298): the bundle, and the rule that admits new rollouts."""

from __future__ import annotations

from rl_plugins.methods.areal.admission import PAPER, ArealAdmission, capacity, recovered

__all__ = ["PAPER", "ArealAdmission", "capacity", "recovered"]
