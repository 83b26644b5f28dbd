"""Tasks and environments that others made, for runs of TRL and verl: one module per library, each an optional extra.

A module imports its library when something is asked of it, so importing this package loads none.
"""

from __future__ import annotations

from rl_plugins.environments.gymnasium import Gymnasium
from rl_plugins.environments.textworld import TextWorld
from rl_plugins.environments.trl_tools import TRLTools
from rl_plugins.environments.verifiers import Verifiers

__all__ = ["Gymnasium", "TRLTools", "TextWorld", "Verifiers"]
