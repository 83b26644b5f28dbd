"""Our results as the package carries them: `published.json`, made of the raw results by `rl-plugins bench --publish`.

Nothing here reads raw results, so a card is shown without their libraries.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, Literal

from rl_plugins.cards.results import Result as Measured
from rl_plugins.lab.bench.claims import LOOKS, claims_of
from rl_plugins.lab.bench.tasks import METRICS, TASKS

COSTS: Mapping[str, str] = {
    "rows_trained": "rows trained",
    "tokens_decoded": "tokens decoded",
    "seconds": "time",
}


@cache
def ours() -> Mapping[str, Any]:
    """The summary that the package carries."""
    found: dict[str, Any] = json.loads(
        files("rl_plugins.lab.bench").joinpath("published.json").read_text(encoding="utf-8")
    )
    return found


def verdicts_of(method: str) -> Sequence[Mapping[str, Any]]:
    """Its claims with our verdicts."""
    return [claim for claim in ours()["claims"] if claim["method"] == method]


def place_of(variant: str, task: str) -> Mapping[str, Any] | None:
    """A place of the matrix; None where nothing was run."""
    return next((p for p in ours()["matrix"] if (p["variant"], p["task"]) == (variant, task)), None)


def numbers(told: Mapping[str, Any]) -> str:
    """ "+0.061 (+0.022 to +0.100)", of a claim or a place; empty where nothing was measured."""
    if "mean" not in told:
        return ""
    places = 3 if max(abs(told["low"]), abs(told["high"])) < 10 else 0
    return f"{told['mean']:+.{places}f} ({told['low']:+.{places}f} to {told['high']:+.{places}f})"


def tasks_run() -> list[str]:
    """Tasks in which something was run, in their order."""
    found = {place["task"] for place in ours()["matrix"]}
    return [task for task in TASKS if task in found]


def methods_run(told: Mapping[str, Any] | None = None) -> list[str]:
    """Methods and bundles of which a claim was run, in the order of their names.

    Args:
        told: a summary; none: ours.
    """
    run = {c["method"] for c in (told or ours())["claims"] if "mean" in c or c["verdict"] == "failed"}
    return sorted(run)


def measured_of(method: str) -> list[Measured]:
    """Our results on a method as its card has them: its claims that were decided, and the neutral task."""
    found = []
    for told in verdicts_of(method):
        if told["verdict"] in ("confirmed", "refuted", "undecided") and "mean" in told:
            what = f"{METRICS[told['metric']][1]} in `{told['task']}` against `{told['than']}`"
            found.append(
                Measured(what, _mark(told), f"{numbers(told)}, {told['seeds']} seeds", "claims", f"bench/{method}.md")
            )
    neutral = place_of(method, "neutral")
    if neutral and "mean" in neutral and neutral["seeds"] >= LOOKS[0]:
        what = "right answers where nothing asks for it (`neutral`)"
        told_text = f"{numbers(neutral)}, {neutral['seeds']} seeds"
        found.append(Measured(what, neutral["mark"], told_text, *_place_of_neutral(method)))
    return found


def _place_of_neutral(method: str) -> tuple[str, str]:
    own = method in methods_run()
    return ("in-each-task", f"bench/{method}.md") if own else ("methods-by-tasks", "bench.md")


def _mark(told: Mapping[str, Any]) -> Literal["better", "worse", "no significant difference"]:
    """A claim is refuted by a difference that is too small, too, so the interval says which way it goes."""
    return "better" if told["low"] > 0 else "worse" if told["high"] < 0 else "no significant difference"


def claim_lines(method: str) -> list[str]:
    """What the paper claims, and what became of it, a line each."""
    verdicts = {(c["says"], c.get("task", "")): c for c in verdicts_of(method)}
    lines = []
    for claim in claims_of(method):
        if claim.untested:
            lines.append(f"{claim.says} Not tested: {claim.untested}")
            continue
        told = verdicts.get((claim.says, claim.task), {"verdict": "not run"})
        where = f"{claim.metric} in {claim.task} at equal {claim.budget.replace('_', ' ')}, against {claim.than}"
        seeds = f", {told['seeds']} seeds" if "seeds" in told else ""
        lines.append(f"{claim.says} Here ({where}): {told['verdict']} {numbers(told)}".rstrip() + f"{seeds}.")
    return lines
