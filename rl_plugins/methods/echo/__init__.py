"""ECHO (arXiv 2602.02150): reinforcement learning at test time, without labels. The bundle and its parts."""

from __future__ import annotations

from rl_plugins import Bundle

ECHO = Bundle(
    "echo",
    parts={"echo_labels": {}, "echo_tree": {}, "echo_shaping": {}, "echo_clip": {}},
    does="Trains without labels on majority answers, with branching rollouts and entropy-shaped updates",
    problems=("no_verifier", "exploration"),
)
