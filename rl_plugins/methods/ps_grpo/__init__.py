"""PS-GRPO (arXiv 2510.04392): rewards for saying the same to every wording of a question."""

from __future__ import annotations

from rl_plugins.methods.ps_grpo.method import PsGrpo

__all__ = ["PsGrpo"]
