"""LATR (arXiv 2510.24302): the method, its tree, and the similarity of two branches."""

from __future__ import annotations

from rl_plugins.methods.latr.method import Latr
from rl_plugins.methods.latr.tree import Branch, Tree, grow

__all__ = ["Branch", "Latr", "Tree", "grow"]
