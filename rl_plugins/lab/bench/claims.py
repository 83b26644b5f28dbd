"""The claims of the cards (:mod:`rl_plugins.cards.claims`), whose names the bench knows, and what runs say of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from typing import Any

from rl_plugins.cards import claims as cards
from rl_plugins.cards.claims import PaperClaim
from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.bench.differences import ENOUGH, PLANNED, TOTALS, Difference, difference
from rl_plugins.lab.bench.results import CONFIRM_FROM, SEARCH_FROM, Results
from rl_plugins.lab.bench.tasks import COST_UNITS, METRICS, TASKS

# Seeds that decide alone: the first eight chose which claims are run again. Stacks are confirmed on those from 200 on.
FRESH = (*range(ENOUGH, PLANNED), *range(CONFIRM_FROM, CONFIRM_FROM + ENOUGH))


def checked(claim: PaperClaim) -> PaperClaim:
    """The claim.

    Raises:
        ConfigError: an unknown task, metric or cost unit.
    """
    tasks = (claim.task, claim.control_place[1])
    for value, known in (*((task, TASKS) for task in tasks), (claim.metric, METRICS), (claim.budget, COST_UNITS)):
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


def outcome(results: Results, claim: PaperClaim) -> dict[str, Any]:
    """What became of a claim, as an entry of `claims.json`, see :func:`rl_plugins.cards.claims.decide`."""
    told = {k: v for k, v in asdict(claim).items() if v != ""}
    if error := failure(results, claim.task, claim.label):
        return {**told, "error": error}
    found = to(results, claim, claim.than, claim.task, claim.budget)
    against = {}
    if found and claim.metric not in TOTALS and claim.budget != "tokens_decoded":
        against["tokens"] = to(results, claim, claim.than, claim.task, "tokens_decoded")
    if found and claim.control:
        against["control"] = to(results, claim, *claim.control_place, claim.budget)
    against = {name: d for name, d in against.items() if d}
    return {**told, **found, **({"against": against} if against else {})}


def to(results: Results, claim: PaperClaim, than: str, task: str, budget: str) -> dict[str, Any]:
    """The difference of a claim's variant to another one; empty with too few seeds."""
    fresh = set(results.seeds(claim.task, claim.label, FRESH)) & set(results.seeds(task, than, FRESH))
    seeds = sorted(fresh) if len(fresh) >= ENOUGH else range(SEARCH_FROM)
    return figures(difference(results, claim.task, claim.label, than, claim.metric, budget, seeds, task))


def figures(found: Difference | None) -> dict[str, Any]:
    """A difference as plain data; empty with too few seeds for a verdict."""
    if found is None or found.seeds < ENOUGH:
        return {}
    return {name: value if name == "seeds" else round(value, 5) for name, value in asdict(found).items()}


def failure(results: Results, task: str, variant: str) -> str:
    """The error of a variant whose runs all failed; else empty."""
    runs = [run for (t, v, _), run in results.runs.items() if (t, v) == (task, variant)]
    return runs[0].error if runs and all(run.error for run in runs) else ""


def differences_from_grpo(results: Results, variant: str) -> list[Mapping[str, Any]]:
    """Of a variant in every task that has it: the difference in the metric of the task at equal steps and at equal
    tokens, and the totals over those of GRPO at equal steps; or why all runs failed."""
    found: list[Mapping[str, Any]] = []
    for task in TASKS.values():
        place = {"variant": variant, "task": task.name}
        if error := failure(results, task.name, variant):
            found.append({**place, "error": error})
        elif d := figures(difference(results, task.name, variant, "grpo", task.metric)):
            tokens = difference(results, task.name, variant, "grpo", task.metric, "tokens_decoded")
            found.append({**place, **d, "tokens": figures(tokens), "costs": costs(results, task.name, variant)})
    return found


def costs(results: Results, task: str, variant: str, than: str = "grpo") -> dict[str, float]:
    """Totals of a variant over those of GRPO at equal steps: mean of the ratios over seeds."""
    ratios: dict[str, list[float]] = {name: [] for name in COST_UNITS[1:]}
    for seed in set(results.seeds(task, variant)) & set(results.seeds(task, than)):
        both = [results.runs[task, v, seed].curves.get("reward") for v in (variant, than)]
        if all(both):
            mine, other = (points[-1][0] for points in both if points)
            for name, of in ratios.items():
                of.append(float(mine[name]) / float(other[name]))
    return {name: round(sum(of) / len(of), 3) for name, of in ratios.items() if of}
