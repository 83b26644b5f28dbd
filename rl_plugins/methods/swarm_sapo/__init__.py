"""SAPO, swarm sampling policy optimization (arXiv 2509.08721): the method, and the exchange of its packages."""

from __future__ import annotations

from rl_plugins.methods.swarm_sapo.exchange import Exchange, Files, Http, open_exchange
from rl_plugins.methods.swarm_sapo.method import SwarmSapo
from rl_plugins.methods.swarm_sapo.packages import Package, Schema, read_packages

__all__ = ["Exchange", "Files", "Http", "Package", "Schema", "SwarmSapo", "open_exchange", "read_packages"]
