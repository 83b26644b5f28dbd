"""Methods of RL post-training papers as plugins for TRL and verl.

`from rl_plugins.trl import GRPOConfig, GRPOTrainer` and name methods in the config. Importing this package loads no
host and no torch, and scans no entry points.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_plugins.errors import ConfigError, MethodError, RLPluginsError, StateError
    from rl_plugins.losses import aggregate, ppo_clip
    from rl_plugins.method import Bundle, Idle, Measured, Method, Paper
    from rl_plugins.params import MethodParams, param
    from rl_plugins.rollouts import Completion, Plan, PlanRow, Rollouts, Shape, Terms, Tokens, Update

__version__ = "0.1.0"

_HOME = {
    "Bundle": "method",
    "Idle": "method",
    "Measured": "method",
    "Method": "method",
    "Paper": "method",
    "MethodParams": "params",
    "param": "params",
    "Completion": "rollouts",
    "Plan": "rollouts",
    "PlanRow": "rollouts",
    "Rollouts": "rollouts",
    "Shape": "rollouts",
    "Terms": "rollouts",
    "Tokens": "rollouts",
    "Update": "rollouts",
    "aggregate": "losses",
    "ppo_clip": "losses",
    "ConfigError": "errors",
    "MethodError": "errors",
    "RLPluginsError": "errors",
    "StateError": "errors",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"rl_plugins.{_HOME[name]}"), name)
    raise AttributeError(f"module 'rl_plugins' has no attribute {name!r}")
