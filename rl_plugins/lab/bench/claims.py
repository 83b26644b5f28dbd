"""The claims of the cards (:mod:`rl_plugins.cards.claims`), whose names the bench knows."""

from __future__ import annotations

from functools import cache

from rl_plugins.cards import claims as cards
from rl_plugins.cards.claims import PaperClaim
from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.bench.tasks import COST_UNITS, METRICS, TASKS

LOOKS = (8, 12, 16)  # seeds at which a claim is looked at
DECIDED = ("confirmed", "refuted")  # verdicts that end a claim


def checked(claim: PaperClaim) -> PaperClaim:
    """The claim.

    Raises:
        ConfigError: an unknown task, metric or cost unit.
    """
    for value, known in ((claim.task, TASKS), (claim.metric, METRICS), (claim.budget, COST_UNITS)):
        if value and value not in known:
            raise ConfigError(f"The claim of {claim.method} names {value!r}. Known: {', '.join(known)}.")
    return claim


@cache
def claims() -> tuple[PaperClaim, ...]:
    """All claims, by method."""
    return tuple(map(checked, cards.claims()))


def claims_of(method: str) -> list[PaperClaim]:
    """Those of a method or bundle."""
    return [claim for claim in claims() if claim.method == method]
