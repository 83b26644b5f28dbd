"""RTV and PDR (arXiv 2604.16529): the method, and the tournament alone."""

from __future__ import annotations

from rl_plugins.methods.rtv_pdr.method import RtvPdr
from rl_plugins.methods.rtv_pdr.tournament import parse_vote, rtv, rtv_rounds

__all__ = ["RtvPdr", "parse_vote", "rtv", "rtv_rounds"]
