"""RollArt (arXiv 2512.22560): what a run of it is on verl, and its redundant rollouts."""

from __future__ import annotations

from rl_plugins.method import Bundle
from rl_plugins.methods.rollart.redundancy import PAPER, RollartRedundancy

ROLLART = Bundle(
    name="rollart",
    parts={
        "areal_admission": {"max_staleness": 1, "bound": "drop"},
        "rollart_redundancy": {"spare": 1},
    },
    paper=PAPER,
    about=(
        "Rollouts of a prompt advance alone, spare ones absorb slow environments "
        "(`rollart_redundancy`), and generation runs during training with bounded staleness. The "
        "bound is `max_staleness` of `areal_admission`, which sets verl's num_warmup_batches and "
        "max_off_policy_threshold and drops older groups; the paper recommends 1. Add a method "
        "that plays the agent (`turn_control`). The update is not changed. Two parts are no "
        "methods: the router by hardware (verl's `rollout.router_config_path`) and rewards as a "
        "service; docs/disaggregated.md has both. In TRL the bundle is refused: its GRPOTrainer "
        "does not generate while it trains, and it has one server address, so there is nothing to "
        "route. `rollart_redundancy` alone works there."
    ),
    does="Trains agents asynchronously with bounded staleness and spare rollouts",
    problems=("long_tail", "agents"),
    goes_with={
        "turn_control": "Plays the agent, one rollout at a time.",
        "decoupled_ppo": "Corrects for rollouts that are a version old.",
    },
)

__all__ = ["ROLLART", "RollartRedundancy"]
