"""What each paper says of its method, as a difference that the bench measures.

`claims.toml` was written before the runs that decide about it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from rl_plugins.bench.cells import CELLS, CURRENCIES, METRICS
from rl_plugins.errors import ConfigError

LOOKS = (8, 12, 16)  # seeds at which a claim is looked at
DECIDED = ("confirmed", "refuted")  # verdicts that end a claim


@dataclass(frozen=True)
class PaperClaim:
    """One claim. It is refuted where the interval of the difference lies below `least`.

    Args:
        method: the method or bundle it is about.
        says: what the paper says, with its own figure where it gives one.
        cell: where it should show; empty: the bench cannot test it.
        metric: key of `METRICS`.
        better: the direction that the paper promises.
        least: smallest difference that matters, in units of the metric.
        budget: what is equal.
        than: arm that it is compared with.
        arm: arm that is run; empty: the method.
        untested: why no cell tests it.

    Raises:
        ConfigError: an unknown cell, metric or currency, or neither a cell nor a reason.
    """

    method: str
    says: str
    cell: str = ""
    metric: str = "right"
    better: Literal["higher", "lower"] = "higher"
    least: float = 0.02
    budget: str = "steps"
    than: str = "grpo"
    arm: str = ""
    untested: str = ""

    def __post_init__(self) -> None:
        if bool(self.cell) == bool(self.untested):
            raise ConfigError(f"The claim of {self.method} needs a cell, or `untested` with the reason; one of both.")
        for value, known in ((self.cell, CELLS), (self.metric, METRICS), (self.budget, CURRENCIES)):
            if value and value not in known:
                raise ConfigError(f"The claim of {self.method} names {value!r}. Known: {', '.join(known)}.")

    @property
    def label(self) -> str:
        """The arm that is run."""
        return self.arm or self.method


@cache
def claims() -> Sequence[PaperClaim]:
    """All claims, in the order of `claims.toml`."""
    text = files("rl_plugins.bench").joinpath("claims.toml").read_text(encoding="utf-8")
    return tuple(PaperClaim(**entry) for entry in tomllib.loads(text).get("claim", ()))


def claims_of(method: str) -> list[PaperClaim]:
    """Those of a method or bundle."""
    return [claim for claim in claims() if claim.method == method]
