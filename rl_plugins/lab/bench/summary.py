"""From the raw results to the summary that the package carries (`ours.json`)."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

import numpy as np

from rl_plugins.lab.bench.claims import LOOKS, claims
from rl_plugins.lab.bench.combine import attributions, stacks
from rl_plugins.lab.bench.differences import Difference
from rl_plugins.lab.bench.published import COSTS
from rl_plugins.lab.bench.results import SEARCH_FROM, Results
from rl_plugins.lab.bench.verdicts import ClaimResult, decide, failure, matrix
from rl_plugins.lab.bench.verl_runs import agreement


def summary(results: Results, in_verl: Results | None = None) -> dict[str, Any]:
    """Everything that pages, cards and `suggest` say of the bench.

    Args:
        in_verl: results of the sample in verl.
    """
    variants = variants_of(results)
    every = matrix(results, variants)
    places = {key: p for key, p in every.items() if p.found is None or p.found.seeds >= LOOKS[0]}
    return {
        "runs": sum(not run.error for run in results.runs.values()),
        "hours": round(sum(run.record["seconds"] for run in results.runs.values()) / 3600, 2),
        "last": max((run.record["date"] for run in results.runs.values()), default=""),
        "versions": sorted({run.record["versions"] for run in results.runs.values()}),
        "claims": [_claim(decided) for decided in decide(results, claims())],
        "matrix": [
            {"variant": variant, "task": task, "mark": place.mark, **_numbers(place.found)}
            | ({"error": failure(results, task, variant)} if place.mark == "failed" else {})
            for (variant, task), place in places.items()
        ],
        "costs": [
            {"variant": variant, "task": task, **found}
            for variant, task in places
            if (found := costs(results, task, variant))
        ],
        "stacks": stacks(results),
        "attributions": attributions(results),
        "hosts": list(agreement(results, in_verl or Results())),
    }


def variants_of(results: Results) -> list[str]:
    """All variants but plain GRPO, in the order of their names."""
    return sorted({variant for _, variant, seed in results.runs if variant != "grpo" and seed < SEARCH_FROM})


def costs(results: Results, task: str, variant: str, than: str = "grpo") -> dict[str, float]:
    """Totals of a variant over those of GRPO at equal steps: mean of the ratios over seeds."""
    ratios: dict[str, list[float]] = {name: [] for name in COSTS}
    for seed in set(results.seeds(task, variant)) & set(results.seeds(task, than)):
        both = [results.runs[task, a, seed].curves.get("reward") for a in (variant, than)]
        if all(both):
            mine, other = (points[-1][0] for points in both if points)
            for name, of in ratios.items():
                of.append(float(mine[name]) / float(other[name]) if other[name] else math.nan)
    return {name: round(float(np.nanmean(of)), 3) for name, of in ratios.items() if of and not np.isnan(of).all()}


def _claim(decided: ClaimResult) -> dict[str, Any]:
    told = {k: v for k, v in asdict(decided.claim).items() if v != ""}
    told |= {"verdict": decided.verdict, **_numbers(decided.found)}
    if decided.tuned:
        told |= {"lost": decided.lost, "tuned": decided.tuned, "again": _numbers(decided.again)}
    return {**told, "error": decided.error} if decided.error else told


def _numbers(found: Difference | None) -> dict[str, Any]:
    if found is None:
        return {}
    names = ("mean", "low", "high", "value", "other")
    return {**{name: round(getattr(found, name), 5) for name in names}, "seeds": found.seeds}
