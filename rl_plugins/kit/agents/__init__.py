"""What methods with turns use: the loop of an agent, the environments it acts in, and the turns of a batch."""

from __future__ import annotations

from rl_plugins.kit.agents.environment import ENDED, Environment, Observation, TurnRecord
from rl_plugins.kit.agents.loop import Episode, Subprogram, act, finish, generate, open_episode, play, reply

__all__ = [
    "ENDED",
    "Environment",
    "Episode",
    "Observation",
    "Subprogram",
    "TurnRecord",
    "act",
    "finish",
    "generate",
    "open_episode",
    "play",
    "reply",
]
