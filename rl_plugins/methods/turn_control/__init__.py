"""Turn control (arXiv 2510.16786): limits an agent's turns, reminds it of the limit, extends unfinished rollouts."""

from __future__ import annotations

from rl_plugins.methods.turn_control.method import CUT, TurnControl, turns_at

__all__ = ["CUT", "TurnControl", "turns_at"]
