"""From the raw results to what the package carries: `published.json`, and claims and results on the cards."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from rl_plugins.cards.claims import with_verdict
from rl_plugins.cards.results import Direction, Result, verdict_of
from rl_plugins.core.files import write_text
from rl_plugins.lab.bench.claims import LOOKS, claims
from rl_plugins.lab.bench.combine import attributions, stacks
from rl_plugins.lab.bench.differences import Difference
from rl_plugins.lab.bench.published import COSTS
from rl_plugins.lab.bench.results import SEARCH_FROM, Results
from rl_plugins.lab.bench.tasks import METRICS
from rl_plugins.lab.bench.verdicts import ClaimResult, Stage, decide, failure, matrix
from rl_plugins.lab.bench.verl_runs import agreement
from rl_plugins.runtime import registry


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


def write(package: Path, results: Results, in_verl: Results | None = None) -> dict[str, Any]:
    """Writes what the package carries, and returns the summary.

    Args:
        package: the folder `rl_plugins` of a checkout.
        in_verl: results of the sample in verl.
    """
    told = summary(results, in_verl)
    claims = [{k: v for k, v in claim.items() if k != "verdict"} for claim in told["claims"]]
    default = {f.name: f.default for f in fields(Result)}
    of = [{k: v for k, v in asdict(r).items() if v != default[k]} for r in records(results)]
    rest = {k: v for k, v in told.items() if k != "claims"}
    write_text(package / "lab" / "bench" / "published.json", json.dumps(rest, indent=1) + "\n")
    for place, rows in ((Path("claims.json"), claims), (Path("records", "bench.json"), of)):
        text = ",\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
        write_text(package / "cards" / place, f"[\n{text}\n]\n")
    return told


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


def _claim(decided: ClaimResult) -> Mapping[str, Any]:
    told = {k: v for k, v in asdict(decided.claim).items() if v != ""}
    told |= _numbers(decided.found) | _ps(decided.stage)
    if decided.tuned:
        told |= {"lost": decided.lost, "tuned": decided.tuned, "again": {}}
        if decided.again:
            told["again"] = _numbers(decided.again.found) | _ps(decided.again)
    return with_verdict({**told, "error": decided.error} if decided.error else told)


def _ps(stage: Stage | None) -> dict[str, float]:
    return {"above": _p(stage.above), "below": _p(stage.below)} if stage else {}


def _p(p: float) -> float:
    return float(f"{p:.3g}")


def records(results: Results) -> list[Result]:
    """Results for the cards: claims that were run, and the task `neutral`, where nothing asks for the method."""
    asked = claims()
    run = [decided for decided in decide(results, asked) if decided.stage]
    found = [_of_claim(decided, len(run)) for decided in run]
    of = {decided.claim.method for decided in run}
    every = matrix(results, variants_of(results))
    why = f"among {len(every)} comparisons"
    for method in registry.all_names():
        place = every.get((method, "neutral"))
        if place and place.found and place.found.seeds >= LOOKS[0]:
            d, own = place.found, method in of
            page = (f"bench/{method}.md", "in-each-task") if own else ("bench.md", "methods-by-tasks")
            what = "right answers on held-out prompts (share), `neutral`, where nothing asks for the method"
            found.append(_record(method, what, "higher", "grpo", d, place.p, "steps", why, *page))
    return found


def _of_claim(decided: ClaimResult, among: int) -> Result:
    claim = decided.claim
    assert decided.found
    what = f"{METRICS[claim.metric][1]}, `{claim.task}`" + (f" (`{claim.variant}`)" if claim.variant else "")
    page = (f"bench/{claim.method}.md", "claims")
    why = f"with a searched learning rate of {decided.lost}" if decided.again else f"among {among} claims"
    return _record(claim.method, what, claim.better, claim.than, decided.found, decided.p, claim.budget, why, *page)


def _record(
    method: str,
    what: str,
    better: Direction,
    than: str,
    d: Difference,
    p: float | None,
    budget: str,
    why: str,
    page: str,
    where: str,
) -> Result:
    """A difference as a result: in the unit of the metric, not turned to the better direction.

    Args:
        why: it is not significant where its interval says it is.
    """
    low, high = (d.low, d.high) if better == "higher" else (-d.high, -d.low)
    mean = d.mean if better == "higher" else -d.mean
    verdict = verdict_of(low, high, better, p=p)
    corrected = verdict == "no significant difference" and not low <= 0 <= high
    digits = 3 if max(abs(low), abs(high)) < 10 else 0
    if verdict_of(round(low, digits), round(high, digits), better, p=p) != verdict:
        digits += 2
    return Result(
        method,
        what,
        better,
        than,
        mean=round(mean, digits),
        low=round(low, digits),
        high=round(high, digits),
        value=(round(d.value, digits),),
        other=(round(d.other, digits),),
        paired=True,
        p=None if p is None else _p(p),
        seeds=d.seeds,
        budget=budget.replace("_", " "),
        note=f"{d.seeds} seeds" + (f", not significant {why}" if corrected else ""),
        page=page,
        where=where,
    )


def _numbers(found: Difference | None) -> dict[str, Any]:
    if found is None:
        return {}
    names = ("mean", "low", "high", "value", "other")
    return {**{name: round(getattr(found, name), 5) for name in names}, "seeds": found.seeds}
