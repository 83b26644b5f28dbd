"""Methods of RL post-training papers as plugins for TRL and verl.

`from rl_plugins.trl import GRPOConfig, GRPOTrainer` and name methods in the config. The author of a method imports from
here: `from rl_plugins import Method, MethodParams, param, Rollouts`. Importing this package loads no host and no torch,
and scans no entry points.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_plugins.core.errors import ConfigError, MethodError, RLPluginsError, StateError
    from rl_plugins.core.groups import Groups
    from rl_plugins.core.losses import aggregate, ppo_clip
    from rl_plugins.core.method import Bundle, Idle, Method, from_params, signals
    from rl_plugins.core.params import GIVEN, MethodParams, param
    from rl_plugins.core.requests import Call, Generate, Program, Prompt, Score, Trajectory
    from rl_plugins.core.rollouts import (
        Admission,
        Completion,
        Plan,
        PlanRow,
        PromptPool,
        Queue,
        Rollouts,
        Rows,
        Run,
        Shape,
        Terms,
        Tokens,
        Update,
    )

__version__ = "0.1.0"

_NAMES = {
    "errors": "ConfigError MethodError RLPluginsError StateError",
    "losses": "aggregate ppo_clip",
    "method": "Bundle Idle Method from_params signals",
    "params": "GIVEN MethodParams param",
    "requests": "Call Generate Prompt Program Score Trajectory",
    "rollouts": "Admission Completion Plan PlanRow PromptPool Queue Rollouts Rows Run Shape Terms Tokens Update",
    "groups": "Groups",
}
_HOME = {name: module for module, names in _NAMES.items() for name in names.split()}

# fmt: off
__all__ = [  # a literal: type checkers read it
    "__version__", "Admission", "Bundle", "Call", "Completion", "ConfigError", "GIVEN", "Generate", "Groups", "Idle",
    "Method", "MethodError", "MethodParams", "Plan", "PlanRow", "Program", "Prompt", "PromptPool", "Queue",
    "RLPluginsError", "Rollouts", "Rows", "Run", "Score", "Shape", "StateError", "Terms", "Tokens", "Trajectory",
    "Update", "aggregate", "from_params", "param", "ppo_clip", "signals",
]
# fmt: on


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"rl_plugins.core.{_HOME[name]}"), name)
    raise AttributeError(f"module 'rl_plugins' has no attribute {name!r}")
