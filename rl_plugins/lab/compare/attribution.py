"""Subsets of the methods as variants, and which method brought what."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import write_text
from rl_plugins.runtime import registry
from rl_plugins.runtime.stack import build_stack
from rl_plugins.tools.attribution import attribute, bootstrap, needed

MOST = 5  # methods whose subsets are all trained: 2^5 variants, each with every seed


@dataclass(frozen=True)
class Cube:
    """The subsets of methods that are variants.

    Args:
        methods: different names; `vade+mc_grpo` counts as one.
        pairs: of a random order and its reverse, along which methods are added; None: every subset is a variant.

    Raises:
        ConfigError: no method, one of them named twice, too many for every subset, or no pair.
    """

    methods: tuple[str, ...]
    pairs: int | None = None

    def __post_init__(self) -> None:
        if not self.methods:
            raise ConfigError("No method is named. Name them, or set `methods` in the config.")
        twice = sorted({m for m in self.methods if self.methods.count(m) > 1})
        if twice:
            raise ConfigError(f"--attribute names {twice[0]} twice. Name every method once.")
        if self.pairs is not None and self.pairs < 1:
            raise ConfigError(f"--attribute-pairs is {self.pairs}. It must be at least 1.")
        if self.pairs is None and len(self.methods) > MOST:
            n = len(self.methods)
            raise ConfigError(
                f"--attribute has {n} methods, which are {2**n} variants. Name at most {MOST} (`vade+mc_grpo` counts "
                f"as one), or give --attribute-pairs: 4 pairs of orders are at most {4 * 2 * (n - 1) + 2} variants."
            )

    @property
    def subsets(self) -> list[frozenset[str]]:
        """Those that are scored, small ones first; the first is empty."""
        return sorted(needed(self.methods, samples=self.pairs), key=len)

    @property
    def variants(self) -> list[str]:
        """Labels of all but the empty one, which is the baseline."""
        return [self.label(subset) for subset in self.subsets if subset]

    def label(self, subset: Collection[str]) -> str:
        """The methods of a subset in their order."""
        return "+".join(m for m in self.methods if m in subset)

    def check(self, baseline: str, params: Mapping[str, Mapping[str, Any]]) -> None:
        """Refuses what would end in a variant that cannot run, before any is trained.

        Raises:
            ConfigError: the baseline has methods, or not all of the methods can run together.
        """
        if baseline not in registry.BASELINES:
            raise ConfigError(
                f"--vs is {baseline}. With --attribute the baseline is the host without methods: leave --vs out."
            )
        names = [name for m in self.methods for name in m.split("+")]
        try:
            build_stack(names, {n: v for n, v in params.items() if n in registry.select(names).classes})
        except ConfigError as e:
            raise ConfigError(f"--attribute trains all of {', '.join(self.methods)} together. {e}") from None


def attributed(summary: Mapping[str, Any], cube: Cube, metric: str) -> dict[str, Any]:
    """Shapley values of the methods in one metric of a report on the variants of a cube.

    Seeds that every variant has are paired. The intervals resample them; one seed gives none.

    Raises:
        ConfigError: a variant has not logged the metric, or no seed is finished in every variant.
    """
    by_seed: dict[frozenset[str], dict[int, float]] = {}
    for subset in cube.subsets:
        label = cube.label(subset) or summary["baseline"]
        variant = summary["variants"][label]
        if metric not in variant["metrics"]:
            raise ConfigError(f"The variant {label} has not logged {metric}. Name another one with --metric.")
        by_seed[subset] = dict(zip(variant["seeds"], variant["metrics"][metric]["end"], strict=True))
    seeds = sorted(set.intersection(*(set(of) for of in by_seed.values())))
    if not seeds:
        raise ConfigError("No seed is finished in every variant. Give the same command again to go on.")
    scores: dict[Collection[str], Sequence[float]] = {subset: [of[s] for s in seeds] for subset, of in by_seed.items()}
    found = attribute({subset: sum(v) / len(v) for subset, v in scores.items()}, cube.methods, samples=cube.pairs)
    told: dict[str, Any] = {"metric": metric, "seeds": seeds, "total": found.total, "pairs": cube.pairs}
    told["methods"] = {m: {"value": found[m]} for m in cube.methods}
    if cube.pairs is not None:
        for m, error in zip(cube.methods, found.error.tolist(), strict=True):
            told["methods"][m]["sampling"] = error if math.isfinite(error) else None
    if len(seeds) > 1:
        interval = bootstrap(scores, cube.methods, samples=cube.pairs)
        for m, low, high in zip(cube.methods, interval.low.tolist(), interval.high.tolist(), strict=True):
            told["methods"][m] |= {"low": low, "high": high}
    return told


def table(told: Mapping[str, Any]) -> str:
    """The attribution as Markdown."""
    sampled = told["pairs"] is not None
    lines = [
        f"Shapley values of `{told['metric']}` over {len(told['seeds'])} seeds"
        + (f", from {told['pairs']} pairs of random orders of the methods" if sampled else ""),
        "",
        "| method | brought |" + (" error of sampling orders |" if sampled else ""),
        "|---|---|" + ("---|" if sampled else ""),
    ]
    for name, of in told["methods"].items():
        interval = f" ({of['low']:+.3f} to {of['high']:+.3f})" if "low" in of else ""
        error = f" {'not known' if of['sampling'] is None else format(of['sampling'], '.3f')} |" if sampled else ""
        lines.append(f"| {name} | {of['value']:+.3f}{interval} |{error}")
    return "\n".join([*lines, f"| all together | {told['total']:+.3f} |" + (" |" if sampled else "")])


def write(summary: Mapping[str, Any], cube: Cube, folder: Path) -> str:
    """Writes `attribution.json` and returns the table."""
    told = attributed(summary, cube, summary["metrics"][0])
    write_text(folder / "attribution.json", json.dumps(told, indent=1))
    return table(told)
