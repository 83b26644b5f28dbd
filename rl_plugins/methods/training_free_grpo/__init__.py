"""Training-Free GRPO (arXiv 2510.08191): the method, and the library of experiences it writes."""

from __future__ import annotations

from rl_plugins.methods.training_free_grpo.library import read_library, write_library
from rl_plugins.methods.training_free_grpo.method import TrainingFreeGrpo

__all__ = ["TrainingFreeGrpo", "read_library", "write_library"]
