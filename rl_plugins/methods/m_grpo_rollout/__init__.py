"""The rollouts of M-GRPO (arXiv 2511.13288): a main agent that delegates tasks to sub-agents."""

from __future__ import annotations

from rl_plugins.methods.m_grpo_rollout.method import MGrpoRollout, delegated

__all__ = ["MGrpoRollout", "delegated"]
