"""AEPO (arXiv 2510.14545): entropy-balanced rollouts and updates of agents. The bundle and its parts."""

from __future__ import annotations

from rl_plugins import Bundle

AEPO = Bundle(
    "aepo",
    parts={"aepo_rollout": {}, "aepo_clip": {}, "aepo_advantages": {}},
    does="Branches an agent's rollouts at uncertain turns and gives uncertain tokens more weight in the update",
    problems=("agents", "exploration"),
)
