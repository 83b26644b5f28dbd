"""The learning rate of the variant that lost, searched on seeds that no verdict uses.

A method that is refuted at the learning rate that was best for GRPO may only need another one, and GRPO, where a method
is ahead of it, may need another one in that task. Both get the same search: half and one and a half times the learning
rate of the task, on three seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl_plugins.cards.claims import PaperClaim
from rl_plugins.lab.bench.differences import Difference, difference
from rl_plugins.lab.bench.results import SEARCH_FROM, Results
from rl_plugins.lab.bench.runs import Waiting
from rl_plugins.lab.bench.tasks import task_of

SEEDS = range(SEARCH_FROM, SEARCH_FROM + 3)
FACTORS = (0.5, 1.5)


def rates(task: str, variant: str) -> list[str]:
    """The variant with the learning rates that are tried; none if it names one itself."""
    if "learning_rate=" in variant:
        return []
    base = float(task_of(task).config(Path(), Path())["learning_rate"])
    found = (f"{base * factor:.1e}".replace("e-0", "e-").replace(".0e", "e") for factor in FACTORS)
    return [f"{variant}{',' if '@' in variant else '@'}learning_rate={rate}" for rate in found]


def best(results: Results, claim: PaperClaim, variant: str) -> str:
    """The variant at its best learning rate in the metric of the claim; empty if that is not known yet."""
    tried = rates(claim.task, variant)
    if not all(results.has(claim.task, a, seed) for a in (variant, *tried) for seed in SEEDS):
        return ""
    ahead = {
        a: d.mean
        for a in tried
        if (d := difference(results, claim.task, a, variant, claim.metric, claim.better, claim.budget, seeds=SEEDS))
    }
    found = max(ahead, key=ahead.__getitem__, default=variant)
    return found if ahead.get(found, 0.0) > 0 else variant


def again(results: Results, claim: PaperClaim, lost: str, tuned: str) -> Difference | None:
    """The difference of a claim with the variant that lost at another learning rate."""
    c = replace(claim, than=tuned) if lost == claim.than else replace(claim, variant=tuned)
    return difference(results, c.task, c.label, c.than, c.metric, c.better, c.budget, c.least)


def missing(results: Results, claim: PaperClaim, lost: str, seeds: Sequence[int]) -> list[Waiting]:
    """The runs that are made next: those of the search, then those of the tuned variant on the seeds of the claim."""
    tuned = best(results, claim, lost)
    if not tuned:
        wanted = [Waiting(claim.task, a, seed) for seed in SEEDS for a in (lost, *rates(claim.task, lost))]
    else:
        wanted = [Waiting(claim.task, tuned, seed) for seed in seeds]
    return [w for w in wanted if not results.has(w.task, w.variant, w.seed)]
