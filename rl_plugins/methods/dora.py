"""DORA (arXiv 2509.18883): the loss, the data control, and the bundle of the two."""

from __future__ import annotations

from rl_plugins import Bundle

DORA = Bundle(
    "dora",
    parts={"dora_data": {}, "dora_loss": {}},
    does="Filters groups, masks unreliable rows, and corrects for engine and version in the loss",
    problems=("stale", "no_signal"),
)
