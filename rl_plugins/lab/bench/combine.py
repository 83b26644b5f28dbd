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
from rl_plugins.lab.bench.claims import figures
from rl_plugins.lab.bench.differences import at_budget, difference
from rl_plugins.lab.bench.results import CONFIRM_FROM, SEARCH_FROM, Results
from rl_plugins.lab.bench.runs import Waiting
from rl_plugins.lab.bench.tasks import METRICS, TASKS
from rl_plugins.lab.bench.variants import BASELINES, BenchVariant
from rl_plugins.runtime.stack import build_stack
from rl_plugins.tools.attribution import attribute, bootstrap

MOST = 3  # methods of a stack
SEARCH = range(SEARCH_FROM, SEARCH_FROM + 4)
CONFIRM = range(CONFIRM_FROM, CONFIRM_FROM + 8)
TUNED = ("grpo@learning_rate=1e-4", "grpo@learning_rate=3e-4", "grpo@beta=0.04", "dr_grpo")


def subsets(methods: Sequence[str]) -> list[str]:
    """Variants of every subset, the empty one as GRPO."""
    found = [c for n in range(len(methods) + 1) for c in itertools.combinations(methods, n)]
    return ["+".join(c) or "grpo" for c in found]


def brought(results: Results, task: str, methods: Sequence[str]) -> dict[str, Any] | None:
    """Shapley values of the methods in the metric of a task, over the seeds that every subset has.

    Returns:
        method -> value, low and high; `total`; `seeds`. None with fewer than two such seeds.
    """
    variants = subsets(methods)
    seeds = sorted(set.intersection(*(set(results.seeds(task, variant)) for variant in variants)))
    if len(seeds) < 2:
        return None
    scores: dict[Collection[str], list[float]] = {
        frozenset() if variant == "grpo" else frozenset(variant.split("+")): [
            end(results, task, variant, s) for s in seeds
        ]
        for variant in variants
    }
    found = attribute({players: float(np.mean(of)) for players, of in scores.items()}, methods)
    interval = bootstrap(scores, methods)
    return {
        "task": task,
        "seeds": len(seeds),
        "total": round(found.total, 5),
        "methods": {
            m: {"value": round(found[m], 5), "low": round(float(low), 5), "high": round(float(high), 5)}
            for m, low, high in zip(methods, interval.low, interval.high, strict=True)
        },
    }


def end(results: Results, task: str, variant: str, seed: int) -> float:
    """The metric of the task at the end of a run."""
    points = results.runs[task, variant, seed].curves[METRICS[TASKS[task].metric][0]]
    return at_budget(points, "steps", float(points[-1][0]["steps"]))


def composes(variant: str) -> bool:
    """Whether the methods of a variant can run together."""
    try:
        found = BenchVariant.of(variant)
        build_stack(list(found.methods), found.params)
    except ConfigError:
        return False
    return True


def grow(
    task: str, candidates: Sequence[str], run: Callable[[Sequence[Waiting]], Results], seeds: Sequence[int] = SEARCH
) -> list[str]:
    """The best stack that is found by adding the best method until none helps, `MOST` methods at most.

    Args:
        candidates: methods.
        run: makes runs and returns all results.

    Returns:
        Its methods; empty if no method was ahead of GRPO.
    """
    stack: list[str] = []
    best = _mean(run([Waiting(task, variant, s) for variant in ("grpo", *TUNED) for s in seeds]), task, "grpo", seeds)
    while len(stack) < MOST:
        variants = ["+".join([*stack, name]) for name in candidates if name not in stack]
        variants = [variant for variant in variants if composes(variant)]
        results = run([Waiting(task, variant, s) for variant in variants for s in seeds])
        ends = {variant: _mean(results, task, variant, seeds) for variant in variants}
        ahead = [variant for variant, value in ends.items() if value > best]
        if not ahead:
            break
        chosen = max(ahead, key=ends.__getitem__)
        stack, best = chosen.split("+"), ends[chosen]
    return stack


def _mean(results: Results, task: str, variant: str, seeds: Sequence[int]) -> float:
    if set(results.seeds(task, variant, of=seeds)) != set(seeds):
        return float("-inf")  # one of its runs failed
    return float(np.mean([end(results, task, variant, seed) for seed in seeds]))


def tuned(results: Results, task: str, seeds: Sequence[int] = SEARCH) -> str:
    """GRPO with the options that were best for it on the seeds of the search."""
    return max(("grpo", *TUNED), key=lambda variant: _mean(results, task, variant, seeds))


def confirmed(results: Results, task: str, variant: str) -> Mapping[str, Any]:
    """A stack against GRPO and against tuned GRPO on fresh seeds."""
    metric = TASKS[task].metric
    out: dict[str, Any] = {"task": task, "variant": variant}
    tried = sorted({a for c, a, s in results.runs if c == task and SEARCH_FROM <= s < CONFIRM_FROM})
    out["tried"] = [a for a in tried if a.partition("@")[0] not in BASELINES]
    for name, than in (("grpo", "grpo"), ("tuned", tuned(results, task))):
        found = difference(results, task, variant, than, metric, seeds=CONFIRM)
        if told := figures(found):
            out[name] = {"than": than, **told}
    return out


def stacks(results: Results) -> list[Mapping[str, Any]]:
    """Every stack that was confirmed."""
    found = {(c, a) for c, a, s in results.runs if s >= CONFIRM_FROM and a.partition("@")[0] not in BASELINES}
    return [confirmed(results, task, variant) for task, variant in sorted(found)]


def attributions(results: Results) -> list[Mapping[str, Any]]:
    """Of every three methods whose subsets were all run in a task."""
    out: list[Mapping[str, Any]] = []
    for task in TASKS:
        whole = [a.split("+") for c, a in dict.fromkeys((c, a) for c, a, _ in results.runs) if c == task]
        for methods in (w for w in whole if len(w) >= MOST):
            if all(results.seeds(task, variant) for variant in subsets(methods)) and (
                found := brought(results, task, methods)
            ):
                out.append(found)
    return out
