"""DART (arXiv 2509.23866): what an agent's rollouts are worth. Six methods, usable apart, and their bundle."""

from __future__ import annotations

from rl_plugins import Bundle

DART = Bundle(
    "dart",
    parts={
        "dart_rollouts": {},
        "dart_length": {},
        "dart_pool": {},
        "dart_advantages": {},
        "dart_entropy": {},
        "dart_tis": {},
    },
    does="Curates rollouts of agents: numbers, turns, stored successes, steps with entropy",
    problems=("agents", "no_signal"),
)
