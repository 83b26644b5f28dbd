"""From records to what the package carries, `cards/quality.json`: means over seeds with 95 % intervals."""

from __future__ import annotations

import itertools
import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from rl_plugins.cards.quality import targets_of
from rl_plugins.core.files import write_text
from rl_plugins.lab.quality.measure import Record
from rl_plugins.lab.quality.variants import BASELINE
from rl_plugins.lab.quality.worlds import shown

Interval = list[float]  # mean, low, high
Pair = tuple[float, float, float, float]
SUMMARY = "cards/quality.json"


def interval(values: Sequence[float], half: float) -> Interval:
    """Around a mean."""
    mean = float(np.mean(values))
    return [float(f"{x:.3g}") for x in (mean, mean - half, mean + half)]


def over_seeds(values: Sequence[float]) -> Interval:
    """Of a mean of independent runs, by Student's t."""
    factor = stats.t.ppf(0.975, len(values) - 1) / math.sqrt(len(values))
    return interval(values, float(factor * np.std(values, ddof=1)))


def summary(records: Iterable[Record]) -> dict[str, Any]:
    """What pages and cards say: a place per world, variant and size, each with its ratio to the baseline."""
    by: dict[tuple[str, str, int], dict[int, Record]] = defaultdict(dict)
    runs: dict[str, dict[str, Record]] = defaultdict(dict)
    for r in records:
        if "rewards" in r:
            runs[r["world"]][r["variant"]] = r
        else:
            kept = by[r["world"], r["variant"], r["rollouts"]].get(r["seed"])
            if kept is None or kept["batches"] <= r["batches"]:
                by[r["world"], r["variant"], r["rollouts"]][r["seed"]] = r
    every = [r for found in by.values() for r in found.values()]
    trained = [r for of in runs.values() for r in of.values()]
    pairs, places = between(by), list[dict[str, Any]]()
    wide = {kind: spread(of) for kind, of in pairs.items()}
    for (world, variant, rollouts), found in by.items():
        (methods,) = {tuple(r["methods"]) for r in found.values()}
        place = {"world": shown(world), "variant": variant, "rollouts": rollouts, "methods": list(methods)}
        if refused := next((r["refused"] for r in found.values() if "refused" in r), ""):
            places.append({**place, "refused": refused})
            continue
        base = by.get((world, BASELINE, rollouts), {})
        places.append({**place, **_figures(found, {} if variant == BASELINE else base, wide)})
    return {
        "seeds": len({r["seed"] for r in every}),
        "batches": {
            str(n): max(r["batches"] for r in every if r["rollouts"] == n) for n in {r["rollouts"] for r in every}
        },
        "hours": round(sum(r.get("seconds", 0) for r in [*every, *trained]) / 3600, 2),
        "spread": wide,
        "replication": replication(pairs["ratio"]),
        "trainings": [_training(r, runs[r["world"]]) for r in trained],
        "places": places,
    }


def _training(record: Record, beside: Mapping[str, Record]) -> dict[str, Any]:
    """Of a run of many steps: the reward it reaches, and the difference to GRPO by seed; also to GRPO that generates as
    many rollouts in a step, where there is such a run."""
    told = {k: record[k] for k in ("world", "variant", "methods", "rate", "generated")}
    told["reward"] = over_seeds(record["rewards"])
    if BASELINE in beside:
        told["difference"] = over_seeds(np.subtract(record["rewards"], beside[BASELINE]["rewards"]))
        more = [r for r in beside.values() if not r["methods"] and r["generated"] > beside[BASELINE]["generated"]]
        told["at_equal_rollouts"] = {
            other["variant"]: over_seeds(np.subtract(record["rewards"], other["rewards"]))
            for other in (more if record["methods"] else ())
            if abs(other["generated"] / record["generated"] - 1) < 0.1
        }
    return told


def between(by: Mapping[tuple[str, str, int], Mapping[int, Record]]) -> dict[str, list[Pair]]:
    """Kind of figure -> value and error over batches in the world of one seed, then of the next one."""
    pairs: dict[str, list[Pair]] = {kind: [] for kind in ("noise", "progress", "direction", "ratio")}
    for (world, variant, rollouts), found in by.items():
        base, target = by.get((world, BASELINE, rollouts), {}), targets_of(shown(world))[0]
        told = [found[s] for s in sorted(found) if "refused" not in found[s]]
        for a, b in itertools.pairwise(told):
            pairs["noise"].append((*a["noise"], *b["noise"]))
            for kind in ("progress", "direction"):
                pairs[kind].append((*a[kind][target], *b[kind][target]))
            ratios = [_ratio(r, base.get(r["seed"]), target) for r in (a, b)]
            if variant != BASELINE and all(ratios):
                pairs["ratio"].append((*ratios[0], *ratios[1]))  # type: ignore[arg-type]
    return pairs


def spread(pairs: Sequence[Pair]) -> float:
    """How many errors over batches make an interval in which 95 of 100 figures agree in worlds of two seeds."""
    apart = [abs(a - b) / math.hypot(e, f) for a, e, b, f in pairs if e and f]
    return round(max(1.96, float(np.quantile(apart, 0.95))), 2) if apart else 1.96


def replication(ratios: Sequence[Pair]) -> dict[str, int]:
    """Of how many ratios to GRPO the intervals over batches overlap in two worlds, and of those that are clear in the
    one, how many are on the same side in the other."""
    clear = [(a, b) for a, e, b, _ in ratios if abs(a - 1) > 1.96 * e]
    agree = sum(abs(a - b) <= 1.96 * math.hypot(e, f) for a, e, b, f in ratios)
    same = sum((a > 1) == (b > 1) for a, b in clear)
    return {"figures": len(ratios), "agree": agree, "clear": len(clear), "same": same}


def _ratio(record: Record, base: Record | None, target: str) -> tuple[float, float] | tuple[()]:
    """Progress as a ratio to the baseline's, with its error; empty where there is nothing to divide by."""
    if base is None:
        return ()
    (a, of_a), (b, of_b) = record["progress"][target], base["progress"][target]
    return (a / b, abs(a / b) * math.hypot(of_a / (a or 1), of_b / b)) if b > 4 * of_b > 0 else ()


def _figures(found: Mapping[int, Record], base: Mapping[int, Record], wide: Mapping[str, float]) -> dict[str, Any]:
    told = list(found.values())
    targets = [t for t in targets_of(shown(told[0]["world"])) if t in told[0]["progress"]]

    def over(kind: str, pairs: Sequence[Sequence[float]]) -> Interval:
        values, errors = zip(*pairs, strict=True)
        return interval(values, wide[kind] * math.hypot(*errors) / len(errors))

    ratios = {t: [_ratio(r, base.get(seed), t) for seed, r in found.items()] for t in targets}
    return {
        "seeds": len(told),
        "generated": round(float(np.mean([r["generated"] for r in told])), 1),
        "signal": round(float(np.mean([r["signal"] for r in told])), 1),
        "noise": over("noise", [r["noise"] for r in told]),
        "progress": {t: over("progress", [r["progress"][t] for r in told]) for t in targets},
        "direction": {t: over("direction", [r["direction"][t] for r in told]) for t in targets},
        "ratio": {t: over("ratio", of) for t, of in ratios.items() if all(of)},
    }


def write(package: Path, records: Iterable[Record]) -> Mapping[str, Any]:
    """Writes the summary into the package, and returns it."""
    told = summary(records)
    lines = ",\n".join(json.dumps(place) for place in told["places"])
    head = json.dumps({**told, "places": None}).removesuffix("null}")
    write_text(package / SUMMARY, f"{head}[\n{lines}\n]}}\n")
    return told
