"""M-GRPO (arXiv 2511.13288): the method, and the rollouts of a main agent with the sub-agents it calls."""

from __future__ import annotations

from rl_plugins.methods.m_grpo.method import MGrpo, alignment, sub_agent_format
from rl_plugins.methods.m_grpo.rollout import MGrpoRollout, delegated

__all__ = ["MGrpo", "MGrpoRollout", "alignment", "delegated", "sub_agent_format"]
