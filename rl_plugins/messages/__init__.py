"""Messages between agents: guard of claims, contracts, risk of error cascades, measures of coordination."""

from __future__ import annotations

from rl_plugins.messages.contracts import Contract, Contracts, Proposal
from rl_plugins.messages.guard import GuardDecision, LineageGuard, endpoint_verifier, find_hubs, replay
from rl_plugins.messages.lineage import Claim, Lineage
from rl_plugins.messages.metrics import AgentRuns, Coordination, coordination, redundancy
from rl_plugins.messages.risk import Rates, estimate_rates, propagate, risk, spectral_radius
from rl_plugins.messages.rules import check_arithmetic, compare_claims, split_claims

__all__ = [
    "redundancy",
    "coordination",
    "Coordination",
    "AgentRuns",
    "Proposal",
    "Contracts",
    "Contract",
    "Claim",
    "GuardDecision",
    "Lineage",
    "LineageGuard",
    "Rates",
    "check_arithmetic",
    "compare_claims",
    "endpoint_verifier",
    "estimate_rates",
    "find_hubs",
    "propagate",
    "replay",
    "risk",
    "spectral_radius",
    "split_claims",
]
