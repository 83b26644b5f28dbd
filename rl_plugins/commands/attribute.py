"""`rl-plugins compare --attribute`: every subset of the methods as an arm, and which method brought what."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rl_plugins.attribution import attribute, bootstrap
from rl_plugins.errors import ConfigError

MOST = 5  # methods: 2^5 arms, each with every seed


def cube(methods: Sequence[str]) -> list[str]:
    """An arm for every subset of the methods but the empty one, which is the baseline.

    Raises:
        ConfigError: too many methods, or one of them named twice.
    """
    if len(methods) > MOST:
        raise ConfigError(
            f"--attribute has {len(methods)} methods, which are {2 ** len(methods)} arms. Name at most {MOST}; "
            f"`vade+mc_grpo` counts as one."
        )
    twice = sorted({m for m in methods if list(methods).count(m) > 1})
    if twice:
        raise ConfigError(f"--attribute names {twice[0]} twice. Name every method once.")
    subsets = [[m for k, m in enumerate(methods) if i >> k & 1] for i in range(1, 2 ** len(methods))]
    return ["+".join(subset) for subset in sorted(subsets, key=len)]


def attributed(summary: Mapping[str, Any], methods: Sequence[str], metric: str) -> dict[str, Any]:
    """Shapley values of the methods in one metric of a report on the arms of `cube`.

    Seeds that every arm has are paired. The intervals resample them; one seed gives none.

    Raises:
        ConfigError: an arm has not logged the metric, or no seed is finished in every arm.
    """
    by_seed: dict[frozenset[str], dict[int, float]] = {}
    for label in [summary["baseline"], *cube(methods)]:
        arm = summary["arms"][label]
        if metric not in arm["metrics"]:
            raise ConfigError(f"The arm {label} has not logged {metric}. Name another one with --metric.")
        subset = frozenset() if label == summary["baseline"] else frozenset(_players(label, methods))
        by_seed[subset] = dict(zip(arm["seeds"], arm["metrics"][metric]["end"], strict=True))
    seeds = sorted(set.intersection(*(set(of) for of in by_seed.values())))
    if not seeds:
        raise ConfigError("No seed is finished in every arm. Give the same command again to go on.")
    scores: dict[Collection[str], Sequence[float]] = {subset: [of[s] for s in seeds] for subset, of in by_seed.items()}
    found = attribute({subset: sum(v) / len(v) for subset, v in scores.items()}, list(methods))
    told: dict[str, Any] = {"metric": metric, "seeds": seeds, "total": found.total}
    told["methods"] = {m: {"value": found[m]} for m in methods}
    if len(seeds) > 1:
        interval = bootstrap(scores, list(methods))
        for m, low, high in zip(methods, interval.low.tolist(), interval.high.tolist(), strict=True):
            told["methods"][m] |= {"low": low, "high": high}
    return told


def table(told: Mapping[str, Any]) -> str:
    """The attribution as Markdown."""
    lines = [
        f"Shapley values of `{told['metric']}` over {len(told['seeds'])} seeds",
        "",
        "| method | brought |",
        "|---|---|",
    ]
    for name, of in told["methods"].items():
        interval = f" ({of['low']:+.3f} to {of['high']:+.3f})" if math.isfinite(of.get("low", math.nan)) else ""
        lines.append(f"| {name} | {of['value']:+.3f}{interval} |")
    return "\n".join([*lines, f"| all together | {told['total']:+.3f} |"])


def write(summary: Mapping[str, Any], methods: Sequence[str], folder: Path) -> str:
    """Writes `attribution.json` and returns the table."""
    told = attributed(summary, methods, summary["metrics"][0])
    (folder / "attribution.json").write_text(json.dumps(told, indent=1))
    return table(told)


def _players(label: str, methods: Sequence[str]) -> list[str]:
    """The methods whose subset has this label."""
    for i in range(1, 2 ** len(methods)):
        subset = [m for k, m in enumerate(methods) if i >> k & 1]
        if "+".join(subset) == label:
            return subset
    raise AssertionError(label)
