"""What a trace answers without gradients: recorded rewards and groups, replayed through the real classes."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.probe.answer import Line, measure_all
from rl_plugins.lab.probe.candidates import HostBatch, ProbedCandidate, every_method, of_host, of_methods
from rl_plugins.lab.probe.report import print_replay
from rl_plugins.lab.viewer.folder import TraceFolder
from rl_plugins.runtime import registry
from rl_plugins.tools.gradient_quality.pools import RolloutPool

READ = ("group", "rewards", "raw_reward", "length", "completion", "prompt")


def read(run: Path, last: int | None = None) -> tuple[RolloutPool, HostBatch]:
    """The recorded groups as the prompts of a pool without score functions, and the batch they are of.

    Args:
        last: newest batches that are read; None: all.

    Raises:
        ConfigError: there is no trace, or no group in it.
    """
    trace = TraceFolder(run, last)
    groups: list[list[dict[str, Any]]] = []
    for number in trace.recorded:
        by: dict[int, list[dict[str, Any]]] = {}
        for row in trace.table("rollouts", number, READ).to_pylist():
            by.setdefault(row["group"], []).append(row)
        groups += by.values()
    if not groups:
        raise ConfigError(f"The trace in {trace.path} has no recorded rollouts.")
    size = Counter(map(len, groups)).most_common(1)[0][0]
    kept = [g for g in groups if len(g) == size]
    names = [r["name"] for r in kept[0][0]["rewards"]]
    rewards = np.array([[[r["value"] for r in row["rewards"]] for row in g] for g in kept], float)
    raw = np.array([[row["raw_reward"] for row in g] for g in kept], float)
    flat, whole = rewards.reshape(-1, len(names)), ~np.isnan(rewards).any(-1).ravel()
    weights = np.linalg.lstsq(flat[whole], raw.ravel()[whole], rcond=None)[0].round(6)  # a trace does not tell them
    shape = raw.shape
    pool = RolloutPool(
        name="The trace",
        prob=np.full(shape, 1 / size),
        rewards=rewards,
        right=raw >= 0.5,
        score=np.zeros((*shape, 1)),
        length=np.array([[max(1, row["length"]) for row in g] for g in kept]),
        reward_names=tuple(names),
        reward_weights=tuple(weights.tolist()),
        columns={"prompt": [g[0]["prompt"] for g in kept]},
        said=np.array([[row["completion"] for row in g] for g in kept], dtype=object),
    )
    per_batch = max(1, len(kept) // len(trace.recorded))
    return pool, HostBatch(size, size * min(per_batch, max(1, len(kept) // 2)))


def replay(pool: RolloutPool, host: HostBatch, candidates: Sequence[ProbedCandidate]) -> list[Line]:
    """Of each candidate with its first setting, what its batches are made of."""
    lines, base = list[Line](), None
    for candidate in candidates:
        one = dataclasses.replace(candidate, settings=candidate.settings[:1])
        found, why_not = measure_all(one, [pool], host.rollouts, 1, 0)
        why_not = found[0].idle(base) if found and base else why_not
        base = base or found[0]
        lines.append(Line(candidate.name, why_not=why_not, shares=None if why_not else found[0].shares))
    return lines


def probe_trace(console: Console, run: Path, methods: Sequence[str], last: int | None, as_json: bool) -> None:
    """What the trace of a run says without gradients.

    Raises:
        ConfigError: there is no trace.
    """
    pool, host = read(run, last)
    reward = pool.rewards @ pool.reward_weights
    names = list(registry.select(list(methods)).classes) or every_method()
    low, high = float(reward.min()), float(reward.max())
    lines = replay(pool, host, [*of_host(host), *of_methods(host, names, {}, low, high)])
    if as_json:
        print(json.dumps([dataclasses.asdict(line) for line in lines], indent=1))
        return
    prompts, each = pool.prob.shape
    console.print(f"{prompts} recorded groups of {each} rollouts, in batches of {host.rollouts}.", highlight=False)
    print_replay(console, lines)
