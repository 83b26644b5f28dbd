"""Three small environments for agents: an exact calculator, a grid world and a text shop.

A row of `Calculator.rows(...)`, `Grid.rows(...)` or `Shop.rows(...)` is an episode; its prompt is the first
observation. `policy` has policies that solve part of the episodes. Importing this package loads no torch; importing
`policy` does.
"""

from __future__ import annotations

from rl_plugins.lab.demo.environments.calculator import Calculator
from rl_plugins.lab.demo.environments.grid import Grid
from rl_plugins.lab.demo.environments.sandbox import Outcome, Sandbox
from rl_plugins.lab.demo.environments.shop import Shop

__all__ = ["Calculator", "Grid", "Outcome", "Sandbox", "Shop"]
