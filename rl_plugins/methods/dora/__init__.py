"""DORA (arXiv 2509.18883): the loss, the data control, and the bundle of the two."""

from __future__ import annotations

from rl_plugins.method import Bundle
from rl_plugins.methods.dora.data import DoraData, ends_in_loop
from rl_plugins.methods.dora.length import DoraLength
from rl_plugins.methods.dora.loss import PAPER, DoraLoss
from rl_plugins.methods.dora.reuse import DoraReuse

DORA = Bundle(
    name="dora",
    parts={"dora_data": {}, "dora_loss": {}},
    paper=PAPER,
    about=(
        "Groups without signal leave, and failed gradings and truncated answers are masked (`dora_data`). The loss "
        "clips around the generating policy and caps the weight of the engine (`dora_loss`). The paper keeps several "
        "versions of the weights alive in generation, so that one version makes each answer; no host does, and "
        "`pure: drop` only removes answers of several versions."
    ),
    does="Filters groups, masks unreliable rows, and corrects for engine and version in the loss",
    problems=("stale", "no_signal"),
)

__all__ = ["DORA", "DoraData", "DoraLength", "DoraLoss", "DoraReuse", "ends_in_loop"]
