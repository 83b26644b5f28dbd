"""Fission-GRPO (arXiv 2601.15625): the method, its reward, and tool calls as text."""

from __future__ import annotations

from rl_plugins.methods.fission_grpo.calls import ToolCall, as_calls, correctness, leaks, read_calls, simulate
from rl_plugins.methods.fission_grpo.method import FissionGrpo

__all__ = ["FissionGrpo", "ToolCall", "as_calls", "correctness", "leaks", "read_calls", "simulate"]
