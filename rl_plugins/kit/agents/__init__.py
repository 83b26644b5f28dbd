"""What methods with turns use: the loop of an agent, the environments it acts in, and the turns of a batch."""

from __future__ import annotations

from rl_plugins.kit.agents.environment import ENDED, Environment, Observation, TurnRecord
from rl_plugins.kit.agents.loop import (
    AgentParams,
    Episode,
    Opened,
    Subprogram,
    act,
    episodes,
    finish,
    generate,
    go_on,
    open_episode,
    play,
    reply,
    turn,
)

__all__ = [
    "ENDED",
    "AgentParams",
    "Environment",
    "Episode",
    "Observation",
    "Opened",
    "Subprogram",
    "TurnRecord",
    "act",
    "episodes",
    "finish",
    "generate",
    "go_on",
    "open_episode",
    "play",
    "reply",
    "turn",
]
