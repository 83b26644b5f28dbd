"""Messages between agents: guard of claims, contracts, risk of error cascades, measures of coordination."""

from __future__ import annotations

from rl_plugins.tools.messages.contracts import Contract, Contracts, Proposal
from rl_plugins.tools.messages.endpoints import endpoint_entailment, endpoint_splitter, endpoint_verifier
from rl_plugins.tools.messages.guard import GuardDecision, LineageGuard, find_hubs, replay
from rl_plugins.tools.messages.lineage import Claim, Lineage
from rl_plugins.tools.messages.logs import marker_run, read_logs, write_log
from rl_plugins.tools.messages.metrics import AgentMeans, AgentRuns, Coordination, coordination, redundancy
from rl_plugins.tools.messages.risk import Rates, estimate_rates, propagate, risk, spectral_radius
from rl_plugins.tools.messages.rules import check_arithmetic, compare_claims, split_claims

__all__ = [
    "AgentMeans",
    "AgentRuns",
    "Claim",
    "Contract",
    "Contracts",
    "Coordination",
    "GuardDecision",
    "Lineage",
    "LineageGuard",
    "Proposal",
    "Rates",
    "check_arithmetic",
    "compare_claims",
    "coordination",
    "endpoint_entailment",
    "endpoint_splitter",
    "endpoint_verifier",
    "estimate_rates",
    "find_hubs",
    "marker_run",
    "propagate",
    "read_logs",
    "redundancy",
    "replay",
    "risk",
    "spectral_radius",
    "split_claims",
    "write_log",
]
