"""UI-S1 (arXiv 2509.11543): the method, and the recorded trajectories it makes rollouts on."""

from __future__ import annotations

from rl_plugins.methods.ui_s1.episode import (
    ExpertStep,
    RecordedTurn,
    SemiOnlineEpisode,
    gui_step_reward,
    semi_online_performance,
)
from rl_plugins.methods.ui_s1.method import UiS1, turn_returns

__all__ = [
    "ExpertStep",
    "RecordedTurn",
    "SemiOnlineEpisode",
    "UiS1",
    "gui_step_reward",
    "semi_online_performance",
    "turn_returns",
]
