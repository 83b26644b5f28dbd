"""AReaL (arXiv 2505.24298): the bundle, and the rule that admits new rollouts."""

from __future__ import annotations

from rl_plugins import Bundle

AREAL = Bundle(
    "areal",
    parts={"areal_admission": {}, "decoupled_ppo": {}},
    does="Trains while generation runs ahead, and corrects for the policy that sampled",
    problems=("long_tail", "stale"),
)
