"""What is compared on a pool: the host's own ways, and methods with settings that are worth a try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rl_plugins.cards.catalog import entries
from rl_plugins.core.estimators import Scale
from rl_plugins.core.losses import TRL_AGGREGATION
from rl_plugins.lab.quality.drive import Params, QualityVariant
from rl_plugins.lab.quality.variants import BASELINE, EPOCHS

GROUPS = (4, 8, 16, 32)


@dataclass(frozen=True)
class HostBatch:
    """What the run does without methods.

    Args:
        group: rollouts per prompt. rollouts: of a batch, that are trained.
        scale: of the advantages. loss: TRL's `loss_type`.
    """

    group: int
    rollouts: int
    scale: Scale = "group"
    loss: str = "dapo"

    def variant(self, label: str, methods: Params | None = None, **changes: Any) -> QualityVariant:
        # `bnpo` is `dapo` where a batch is one micro-batch; all have the same warm-up, so that an idle method is seen
        loss = self.loss if self.loss in TRL_AGGREGATION else "dapo"
        own: dict[str, Any] = {"group": self.group, "scale": self.scale, "loss": loss, "warm": EPOCHS, **changes}
        return QualityVariant(label, methods or {}, **own)


@dataclass(frozen=True)
class ProbedCandidate:
    """One line of the answer.

    Args:
        settings: what is tried; of several, the best on one half of the pool is judged on the other.
    """

    name: str
    settings: Sequence[QualityVariant]


def of_host(host: HostBatch) -> list[ProbedCandidate]:
    """The baseline first, then what the host offers itself."""
    plain = host.variant("Dr. GRPO, RLOO", scale="none", loss="dr_grpo")  # equal up to a factor
    groups = [host.variant(f"{g} rollouts per prompt", group=g) for g in GROUPS if g != host.group]
    ways = [host.variant(BASELINE), plain, *groups]
    return [ProbedCandidate(v.label, [v]) for v in ways]


def of_methods(
    host: HostBatch, names: Sequence[str], params: Mapping[str, Mapping[str, Any]], low: float, high: float
) -> list[ProbedCandidate]:
    """Methods one by one.

    Args:
        params: of the run's config; a method that has some there has no other settings.
        low, high: of the rewards in the pool.
    """
    offered: Mapping[str, Sequence[Mapping[str, Any]]] = {
        "mc_grpo": [{}, {"advantage_clip": 3.0}],
        "dars": [{"schedule": "et"}, {"schedule": "hw"}],
        "mssr_baseline": [{"rho": 0.5}, {"rho": 0.9}],
        "mssr_prompts": [{"rho": 0.5}, {"rho": 0.9}],
        "v0_5": [{"reward_low": low, "reward_high": high, "cost": cost} for cost in (math.inf, None)],
    }
    found = []
    for name in names:
        settings = [params[name]] if name in params else offered.get(name, [{}])
        found.append(ProbedCandidate(name, [host.variant(_label(name, s), {name: dict(s)}) for s in settings]))
    return found


def _label(name: str, settings: Mapping[str, Any]) -> str:
    return ", ".join([name, *(f"{k}={v}" for k, v in settings.items())])


def every_method() -> list[str]:
    """All methods of language models, by name."""
    return [e.name for e in entries() if e.kind == "method" and "trl" in e.hosts]
