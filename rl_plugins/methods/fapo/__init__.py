"""FAPO (arXiv 2510.22543): a judge finds right answers with flawed reasoning, and their reward falls."""

from __future__ import annotations

from rl_plugins.methods.fapo.method import Fapo

__all__ = ["Fapo"]
