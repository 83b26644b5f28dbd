"""SCOPE (arXiv 2602.24110): the method, and how a completion is cut into reasoning steps."""

from __future__ import annotations

from rl_plugins.methods.scope.method import Scope
from rl_plugins.methods.scope.steps import first_wrong, split_steps

__all__ = ["Scope", "first_wrong", "split_steps"]
