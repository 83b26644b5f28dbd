"""DART (arXiv 2509.23866): what an agent's rollouts are worth. Six methods, usable apart, and their bundle."""

from __future__ import annotations

from rl_plugins.method import Bundle
from rl_plugins.methods.dart.advantages import DartAdvantages
from rl_plugins.methods.dart.entropy import DartEntropy
from rl_plugins.methods.dart.history import PAPER
from rl_plugins.methods.dart.length import DartLength
from rl_plugins.methods.dart.pool import DartPool
from rl_plugins.methods.dart.rollouts import DartRollouts
from rl_plugins.methods.dart.tis import DartTis

DART = Bundle(
    name="dart",
    parts={
        "dart_rollouts": {},
        "dart_length": {},
        "dart_pool": {},
        "dart_advantages": {},
        "dart_entropy": {},
        "dart_tis": {},
    },
    paper=PAPER,
    about=(
        "Tasks that are mostly solved get fewer rollouts (`dart_rollouts`), and as many turns as their longest success "
        "needed (`dart_length`). A task whose rollouts all fail gets a stored success (`dart_pool`). Every step counts "
        "in the statistics of its group (`dart_advantages`), steps with low entropy are not trained (`dart_entropy`), "
        "and tokens are weighted for the engine that sampled them (`dart_tis`). An agent's method must play the turns, "
        "for example `turn_control`."
    ),
    does="Curates rollouts of agents: numbers, turns, stored successes, steps with entropy",
    problems=("agents", "no_signal"),
)

__all__ = ["DART", "DartAdvantages", "DartEntropy", "DartLength", "DartPool", "DartRollouts", "DartTis"]
