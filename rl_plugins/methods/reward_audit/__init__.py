"""Audit of rewards, before and during training: a defence against what DecepChain (arXiv 2510.00319) shows."""

from __future__ import annotations

from rl_plugins.methods.reward_audit.method import RewardAudit

__all__ = ["RewardAudit"]
