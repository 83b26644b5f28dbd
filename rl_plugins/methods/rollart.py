"""RollArt (arXiv 2512.22560): what a run of it is on verl, and its redundant rollouts."""

from __future__ import annotations

from rl_plugins import Bundle

ROLLART = Bundle(
    "rollart",
    parts={"areal_admission": {"max_staleness": 1, "bound": "drop"}, "rollart_redundancy": {"spare": 1}},
    does="Trains agents asynchronously with bounded staleness and spare rollouts",
    problems=("long_tail", "agents"),
)
