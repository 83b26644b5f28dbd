"""ARRoL (arXiv 2603.24840): the method and its quality head."""

from __future__ import annotations

from rl_plugins.methods.arrol.head import Calibrator, features_of, quality
from rl_plugins.methods.arrol.method import Arrol
from rl_plugins.methods.arrol.survivors import balanced, shift_for, survival

__all__ = [
    "Arrol",
    "Calibrator",
    "balanced",
    "features_of",
    "quality",
    "shift_for",
    "survival",
]
