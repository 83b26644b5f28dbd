"""What each paper says of its method, as a difference that the bench measures.

They are in the cards, and were written before the runs that decide about them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rl_plugins.cards.card_file import card_file
from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.bench.tasks import COST_UNITS, METRICS, TASKS
from rl_plugins.runtime import registry

LOOKS = (8, 12, 16)  # seeds at which a claim is looked at
DECIDED = ("confirmed", "refuted")  # verdicts that end a claim


@dataclass(frozen=True)
class PaperClaim:
    """One claim. It is refuted where the interval of the difference lies below `least`.

    Args:
        method: the method or bundle it is about.
        says: what the paper says, with its own figure where it gives one.
        task: where it should show; empty: the bench cannot test it.
        metric: key of `METRICS`.
        better: the direction that the paper promises.
        least: smallest difference that matters, in units of the metric.
        budget: what is equal.
        than: variant that it is compared with.
        variant: variant that is run; empty: the method.
        untested: why no task tests it.

    Raises:
        ConfigError: an unknown task, metric or cost unit, or neither a task nor a reason.
    """

    method: str
    says: str
    task: str = ""
    metric: str = "right"
    better: Literal["higher", "lower"] = "higher"
    least: float = 0.02
    budget: str = "steps"
    than: str = "grpo"
    variant: str = ""
    untested: str = ""

    def __post_init__(self) -> None:
        if bool(self.task) == bool(self.untested):
            raise ConfigError(f"The claim of {self.method} needs a task, or `untested` with the reason; one of both.")
        for value, known in ((self.task, TASKS), (self.metric, METRICS), (self.budget, COST_UNITS)):
            if value and value not in known:
                raise ConfigError(f"The claim of {self.method} names {value!r}. Known: {', '.join(known)}.")

    @property
    def label(self) -> str:
        """The variant that is run."""
        return self.variant or self.method


@cache
def claims() -> Sequence[PaperClaim]:
    """All claims, by method."""
    names = registry.all_names()
    return tuple(PaperClaim(name, **claim) for name in names for claim in card_file(name).claims)


def claims_of(method: str) -> list[PaperClaim]:
    """Those of a method or bundle."""
    return [claim for claim in claims() if claim.method == method]
