"""From records to what the package carries, `cards/quality.json`: means over seeds with 95 % intervals."""

from __future__ import annotations

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

Interval = list[float]  # mean, low, high
SUMMARY = "cards/quality.json"


def interval(values: Sequence[float], errors: Sequence[float] = ()) -> Interval:
    """Of a mean over worlds of different seeds (Student's t); of a single world that over its batches."""
    mean = float(np.mean(values))
    if len(values) > 1:
        half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    else:
        half = 1.96 * errors[0] if errors else math.nan
    return [float(f"{x:.3g}") for x in (mean, mean - half, mean + half)]


def summary(records: Iterable[Record]) -> dict[str, Any]:
    """What pages and cards say: a place per world, variant and size, each with its ratio to the baseline."""
    by: dict[tuple[str, str, int], dict[int, Record]] = defaultdict(dict)
    for r in records:
        kept = by[r["world"], r["variant"], r["rollouts"]].get(r["seed"])
        if kept is None or kept["batches"] <= r["batches"]:
            by[r["world"], r["variant"], r["rollouts"]][r["seed"]] = r
    every = [r for found in by.values() for r in found.values()]
    places = []
    for (world, variant, rollouts), found in by.items():
        (methods,) = {tuple(r["methods"]) for r in found.values()}
        shown = Path(world).stem if world.endswith(".npz") else world
        place = {"world": shown, "variant": variant, "rollouts": rollouts, "methods": list(methods)}
        if refused := next((r["refused"] for r in found.values() if "refused" in r), ""):
            places.append({**place, "refused": refused})
            continue
        base = by.get((world, BASELINE, rollouts), {})
        places.append({**place, **_figures(found, {s: r for s, r in base.items() if s in found})})
    return {
        "seeds": len({r["seed"] for r in every}),
        "batches": {
            str(n): max(r["batches"] for r in every if r["rollouts"] == n) for n in {r["rollouts"] for r in every}
        },
        "hours": round(sum(r.get("seconds", 0) for r in every) / 3600, 2),
        "places": places,
    }


def _figures(found: Mapping[int, Record], base: Mapping[int, Record]) -> dict[str, Any]:
    seeds = sorted(found)
    targets = [t for t in targets_of(found[seeds[0]]["world"]) if t in found[seeds[0]]["progress"]]

    def over(name: str) -> dict[str, Interval]:
        pairs = {t: [found[s][name][t] for s in seeds] for t in targets}
        return {t: interval([v for v, _ in of], [e for _, e in of]) for t, of in pairs.items()}

    ratio = {}
    for target in targets:
        pairs = [(found[s]["progress"][target], base[s]["progress"][target]) for s in seeds if s in base]
        clear = pairs and all(b[0] > 4 * b[1] > 0 for _, b in pairs)  # else there is nothing to divide by
        if clear:
            errors = [abs(a[0] / b[0]) * math.hypot(a[1] / (a[0] or 1), b[1] / b[0]) for a, b in pairs]
            ratio[target] = interval([a[0] / b[0] for a, b in pairs], errors)
    return {
        "seeds": len(seeds),
        "generated": round(float(np.mean([found[s]["generated"] for s in seeds])), 1),
        "signal": round(float(np.mean([found[s]["signal"] for s in seeds])), 1),
        "noise": interval(*zip(*(found[s]["noise"] for s in seeds), strict=True)),
        "progress": over("progress"),
        "direction": over("direction"),
        "ratio": ratio,
    }


def write(package: Path, records: Iterable[Record]) -> Mapping[str, Any]:
    """Writes the summary into the package, and returns it."""
    told = summary(records)
    lines = ",\n".join(json.dumps(place) for place in told["places"])
    head = json.dumps({**told, "places": None}).removesuffix("null}")
    write_text(package / SUMMARY, f"{head}[\n{lines}\n]}}\n")
    return told
