"""Methods together: which one brought what, and the best stack under an equal budget.

The search for a stack uses the seeds from 100 on, and what it finds is confirmed on those from 200 on, where neither
the stack nor GRPO was looked at before. GRPO with other options takes part, so that it is tuned as much as the stack.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.bench.arms import BASELINES, BenchArm
from rl_plugins.lab.bench.cells import CELLS, METRICS
from rl_plugins.lab.bench.differences import at_budget, difference
from rl_plugins.lab.bench.results import CONFIRM_FROM, SEARCH_FROM, Results
from rl_plugins.lab.bench.runs import Waiting
from rl_plugins.runtime.stack import build_stack
from rl_plugins.tools.attribution import attribute, bootstrap

MOST = 3  # methods of a stack
SEARCH = range(SEARCH_FROM, SEARCH_FROM + 4)
CONFIRM = range(CONFIRM_FROM, CONFIRM_FROM + 8)
TUNED = ("grpo@learning_rate=1e-4", "grpo@learning_rate=3e-4", "grpo@beta=0.04", "dr_grpo")


def subsets(methods: Sequence[str]) -> list[str]:
    """Arms of every subset, the empty one as GRPO."""
    found = [c for n in range(len(methods) + 1) for c in itertools.combinations(methods, n)]
    return ["+".join(c) or "grpo" for c in found]


def brought(results: Results, cell: str, methods: Sequence[str]) -> dict[str, Any] | None:
    """Shapley values of the methods in the metric of a cell, over the seeds that every subset has.

    Returns:
        method -> value, low and high; `total`; `seeds`. None with fewer than two such seeds.
    """
    arms = subsets(methods)
    seeds = sorted(set.intersection(*(set(results.seeds(cell, arm)) for arm in arms)))
    if len(seeds) < 2:
        return None
    scores: dict[Collection[str], list[float]] = {
        frozenset() if arm == "grpo" else frozenset(arm.split("+")): [end(results, cell, arm, s) for s in seeds]
        for arm in arms
    }
    found = attribute({players: float(np.mean(of)) for players, of in scores.items()}, methods)
    interval = bootstrap(scores, methods)
    return {
        "cell": cell,
        "seeds": len(seeds),
        "total": round(found.total, 5),
        "methods": {
            m: {"value": round(found[m], 5), "low": round(float(low), 5), "high": round(float(high), 5)}
            for m, low, high in zip(methods, interval.low, interval.high, strict=True)
        },
    }


def end(results: Results, cell: str, arm: str, seed: int) -> float:
    """The metric of the cell at the end of a run."""
    points = results.runs[cell, arm, seed].curves[METRICS[CELLS[cell].metric][0]]
    return at_budget(points, "steps", float(points[-1][0]["steps"]))


def composes(arm: str) -> bool:
    """Whether the methods of an arm can run together."""
    try:
        found = BenchArm.of(arm)
        build_stack(list(found.methods), found.params)
    except ConfigError:
        return False
    return True


def grow(
    cell: str, candidates: Sequence[str], run: Callable[[Sequence[Waiting]], Results], seeds: Sequence[int] = SEARCH
) -> list[str]:
    """The best stack that is found by adding the best method until none helps, `MOST` methods at most.

    Args:
        candidates: methods.
        run: makes runs and returns all results.

    Returns:
        Its methods; empty if no method was ahead of GRPO.
    """
    stack: list[str] = []
    best = _mean(run([Waiting(cell, arm, s) for arm in ("grpo", *TUNED) for s in seeds]), cell, "grpo", seeds)
    while len(stack) < MOST:
        arms = ["+".join([*stack, name]) for name in candidates if name not in stack]
        arms = [arm for arm in arms if composes(arm)]
        results = run([Waiting(cell, arm, s) for arm in arms for s in seeds])
        ends = {arm: _mean(results, cell, arm, seeds) for arm in arms}
        ahead = [arm for arm, value in ends.items() if value > best]
        if not ahead:
            break
        chosen = max(ahead, key=ends.__getitem__)
        stack, best = chosen.split("+"), ends[chosen]
    return stack


def _mean(results: Results, cell: str, arm: str, seeds: Sequence[int]) -> float:
    if set(results.seeds(cell, arm, of=seeds)) != set(seeds):
        return float("-inf")  # one of its runs failed
    return float(np.mean([end(results, cell, arm, seed) for seed in seeds]))


def tuned(results: Results, cell: str, seeds: Sequence[int] = SEARCH) -> str:
    """GRPO with the options that were best for it on the seeds of the search."""
    return max(("grpo", *TUNED), key=lambda arm: _mean(results, cell, arm, seeds))


def confirmed(results: Results, cell: str, arm: str) -> Mapping[str, Any]:
    """A stack against GRPO and against tuned GRPO on fresh seeds."""
    metric = CELLS[cell].metric
    out: dict[str, Any] = {"cell": cell, "arm": arm}
    tried = sorted({a for c, a, s in results.runs if c == cell and SEARCH_FROM <= s < CONFIRM_FROM})
    out["tried"] = [a for a in tried if a.partition("@")[0] not in BASELINES]
    for name, than in (("grpo", "grpo"), ("tuned", tuned(results, cell))):
        found = difference(results, cell, arm, than, metric, seeds=CONFIRM)
        if found:
            numbers = {k: round(getattr(found, k), 5) for k in ("mean", "low", "high", "value", "other")}
            out[name] = {"than": than, "seeds": found.seeds, **numbers}
    return out


def stacks(results: Results) -> list[Mapping[str, Any]]:
    """Every stack that was confirmed."""
    found = {(c, a) for c, a, s in results.runs if s >= CONFIRM_FROM and a.partition("@")[0] not in BASELINES}
    return [confirmed(results, cell, arm) for cell, arm in sorted(found)]


def attributions(results: Results) -> list[Mapping[str, Any]]:
    """Of every three methods whose subsets were all run in a cell."""
    out: list[Mapping[str, Any]] = []
    for cell in CELLS:
        whole = [a.split("+") for c, a in dict.fromkeys((c, a) for c, a, _ in results.runs) if c == cell]
        for methods in (w for w in whole if len(w) >= MOST):
            if all(results.seeds(cell, arm) for arm in subsets(methods)) and (found := brought(results, cell, methods)):
                out.append(found)
    return out
