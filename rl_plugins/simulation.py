"""Where `Simulation` is found since the first version; it is defined in `rl_plugins.testing.generation`."""

from __future__ import annotations

from rl_plugins.testing.generation import Simulation, summary

__all__ = ["Simulation", "summary"]
