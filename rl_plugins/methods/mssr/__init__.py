"""MSSR (arXiv 2512.18215): one rollout per prompt. The bundle, its parts, and its sampler of prompts."""

from __future__ import annotations

from rl_plugins import Bundle

MSSR = Bundle(
    "mssr",
    parts={"mssr_baseline": {}, "mssr_shaping": {}},
    does="Trains one rollout per prompt with a remembered baseline and an entropy bonus",
    problems=("few_rollouts", "no_signal", "exploration"),
)
