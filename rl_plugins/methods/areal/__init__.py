"""AReaL (arXiv 2505.24298): the bundle, and the rule that admits new rollouts."""

from __future__ import annotations

from rl_plugins.method import Bundle
from rl_plugins.methods.areal.admission import PAPER, ArealAdmission, capacity, recovered
from rl_plugins.methods.decoupled_ppo import DecoupledPpo

AREAL = Bundle(
    name="areal",
    parts={"areal_admission": {}, "decoupled_ppo": {}},
    paper=PAPER,
    about=(
        "Generation runs during training, at most `max_staleness` batches ahead "
        "(`areal_admission`), and the loss separates the policy that sampled from the centre of "
        "the trust region (`decoupled_ppo`). Made for verl's asynchronous trainer modes, where "
        "the engine interrupts and resumes rollouts. TRL's GRPOTrainer does not generate while "
        "it trains: use `april` and `decoupled_ppo` there. The authors recommend eta = 4 to "
        "start with and report no loss up to 8."
    ),
    does="Trains while generation runs ahead, and corrects for the policy that sampled",
    problems=("long_tail", "stale"),
    measured=(ArealAdmission.measured[0], *DecoupledPpo.measured[:2]),
)

__all__ = ["AREAL", "ArealAdmission", "capacity", "recovered"]
