"""What papers say of their methods, and what became of it on the bench (`rl-plugins bench`).

A claim is in the card of its method, as a difference that the bench measures; it was written before its runs. What was
measured is in `claims.json`, which `rl-plugins bench --publish` writes. Its verdict answers the paper:

confirmed      the difference is above zero, in the direction that the paper promises
refuted        the difference is below the smallest one that matters (`least` of the claim)
undecided      neither, with the seeds that were run, or not with the learning rate that suits the side that lost
failed         all runs of the method ended with an error
not run        no runs, or too few
not tested     the bench has no task for it

Whether the method is better or worse than its baseline in the same runs, whatever was promised, is a
:class:`~rl_plugins.cards.results.Result`, whose words are "better", "worse" and "no significant difference". There a
confirmed claim is "better" and an undecided one "no significant difference". A refuted one is any of the three: a
difference can be significant and smaller than what matters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from rl_plugins.cards.card_file import card_file
from rl_plugins.cards.results import ALPHA
from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime import registry

ClaimVerdict = Literal["confirmed", "refuted", "undecided", "not run", "failed", "not tested"]


@dataclass(frozen=True)
class PaperClaim:
    """One claim. Tasks, metrics, variants and cost units are those of `rl-plugins bench`, which checks their names.

    Args:
        method: the method or bundle it is about.
        says: what the paper says, with its own figure where it gives one.
        task: where it should show; empty: the bench cannot test it.
        metric: what is measured.
        better: the direction that the paper promises.
        least: smallest difference that matters, in units of the metric.
        budget: cost unit that is equal in both.
        than: variant that it is compared with.
        variant: variant that is run; empty: the method.
        untested: why no task tests it.

    Raises:
        ConfigError: neither a task nor a reason, or both.
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

    @property
    def label(self) -> str:
        """The variant that is run."""
        return self.variant or self.method


def claim_verdict(stages: Sequence[tuple[float, float]], error: str = "", untested: str = "") -> ClaimVerdict:
    """What became of a claim.

    Args:
        stages: p-values of "not above zero" and of "at least `least`", corrected for the number of looks and claims;
            first of the runs at the learning rate of the task, then, if it was searched, of those where the side that
            lost has the one that suits it. Empty: too few runs.
        error: why all runs of the method failed.
        untested: why there are none.
    """
    if not stages:
        return "not tested" if untested else "failed" if error else "not run"
    words: set[ClaimVerdict] = {
        "refuted" if below < ALPHA / 2 else "confirmed" if above < ALPHA / 2 else "undecided" for above, below in stages
    }
    return words.pop() if len(words) == 1 else "undecided"


@cache
def claims() -> tuple[PaperClaim, ...]:
    """All claims, by method."""
    return tuple(claim for name in registry.all_names() for claim in claims_of(name))


def claims_of(method: str) -> list[PaperClaim]:
    """Those of a method or bundle."""
    return [PaperClaim(method, **claim) for claim in card_file(method).claims]


@cache
def outcomes() -> tuple[Mapping[str, Any], ...]:
    """The claims with our figures and their verdicts, as the package carries them."""
    found = json.loads(files("rl_plugins.cards").joinpath("claims.json").read_text(encoding="utf-8"))
    return tuple(map(with_verdict, found))


def with_verdict(outcome: Mapping[str, Any]) -> Mapping[str, Any]:
    """An entry of `claims.json` and its verdict."""
    stages = [(of["above"], of["below"]) for of in (outcome, outcome.get("again")) if of and "above" in of]
    return {**outcome, "verdict": claim_verdict(stages, outcome.get("error", ""), outcome.get("untested", ""))}


def outcomes_of(method: str) -> list[Mapping[str, Any]]:
    """Those of a method or bundle."""
    return [outcome for outcome in outcomes() if outcome["method"] == method]


def numbers(told: Mapping[str, Any]) -> str:
    """ "+0.061 (+0.022 to +0.100)"; empty where nothing was measured."""
    if "mean" not in told:
        return ""
    places = 3 if max(abs(told["low"]), abs(told["high"])) < 10 else 0
    return f"{told['mean']:+.{places}f} ({told['low']:+.{places}f} to {told['high']:+.{places}f})"


def claim_lines(method: str) -> list[str]:
    """What the paper says, and what became of it, a line each."""
    found = {(o["says"], o.get("task", "")): o for o in outcomes_of(method)}
    lines = []
    for claim in claims_of(method):
        if claim.untested:
            lines.append(f"{claim.says} Not tested: {claim.untested}")
            continue
        told = found.get((claim.says, claim.task), {"verdict": "not run"})
        where = f"{claim.metric} in {claim.task} at equal {claim.budget.replace('_', ' ')}, against {claim.than}"
        seeds = f", {told['seeds']} seeds" if "seeds" in told else ""
        lines.append(f"{claim.says} Here ({where}): {told['verdict']} {numbers(told)}".rstrip() + f"{seeds}.")
    return lines
