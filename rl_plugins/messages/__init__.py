"""Messages between agents: guard of claims, contracts, risk of error cascades, measures of coordination."""

from __future__ import annotations

from rl_plugins.messages.risk import Rates, estimate_rates, propagate, risk, spectral_radius

__all__ = ["Rates", "estimate_rates", "propagate", "risk", "spectral_radius"]
