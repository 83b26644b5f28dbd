"""Losses for supervised trainers: they stand outside of `methods:`, and each has a card as a method has."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass

from rl_plugins.core.method import Fidelity
from rl_plugins.core.params import MethodParams

START: Mapping[str, Mapping[str, str]] = {
    "otr": {
        "TRL": "rl-plugins trl sft --loss_type otr",
        "verl": "torchrun --nproc_per_node=N -m rl_plugins.verl.otr",
    }
}
"""Loss -> host -> the command that starts it."""

LOSSES = tuple(START)
"""Their names; each has a module here with its `CARD`."""


@dataclass(frozen=True)
class SupervisedLoss:
    """The card of a loss for supervised trainers.

    Args:
        about: the rule, symbols, shapes, where paper and reviews differ.
        does, fidelity: as of a method.
        start: host -> how a run with it is started.

    What a reader who chooses is told is in `NAME.toml` next to the module, as for a method.
    """

    name: str
    does: str
    fidelity: Fidelity
    params: type[MethodParams]
    about: str
    start: Mapping[str, str]


def card_of(name: str) -> SupervisedLoss:
    """The card of one of `LOSSES`."""
    card: SupervisedLoss = importlib.import_module(f"rl_plugins.tools.supervised.{name}").CARD
    return card


def not_a_method(name: str) -> str:
    """What to say of the name of such a loss in `methods`; empty for any other name."""
    if name not in LOSSES:
        return ""
    start = "; ".join(f"{host}: `{command}`" for host, command in START[name].items())
    return (
        f"`{name}` is a loss for supervised trainers, not a method: take it out of `methods`, which a trainer with "
        f"rollouts reads. It is started with {start}. `rl-plugins info {name}` explains it."
    )
