"""Sol-RL (arXiv 2604.06916): a large pool of samples, whose best and worst are trained."""

from __future__ import annotations

from rl_plugins.methods.sol_rl.advantages import SolRlAdvantages
from rl_plugins.methods.sol_rl.select import SolRlSelect

__all__ = ["SolRlAdvantages", "SolRlSelect"]
