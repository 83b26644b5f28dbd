"""Sol-RL (arXiv 2604.06916): a large cheap pool of samples, whose best and worst are trained."""

from __future__ import annotations

from rl_plugins import Bundle

SOL_RL = Bundle(
    "sol_rl",
    parts={"sol_rl_explore": {}, "sol_rl_select": {"oversample": 1.0}, "sol_rl_advantages": {}},
    does="Explores seeds with a cheap copy of a diffusion policy, and trains the best and worst made again",
    problems=("few_rollouts",),
)
