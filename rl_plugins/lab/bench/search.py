"""The learning rate of the arm that lost, searched on seeds that no verdict uses.

A method that is refuted at the learning rate that was best for GRPO may only need another one, and GRPO, where a method
is ahead of it, may need another one in that cell. Both get the same search: half and one and a half times the learning
rate of the cell, on three seeds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rl_plugins.lab.bench.cells import cell_of
from rl_plugins.lab.bench.claims import PaperClaim
from rl_plugins.lab.bench.differences import Difference, difference
from rl_plugins.lab.bench.results import SEARCH_FROM, Results
from rl_plugins.lab.bench.runs import Waiting

SEEDS = range(SEARCH_FROM, SEARCH_FROM + 3)
FACTORS = (0.5, 1.5)


def rates(cell: str, arm: str) -> list[str]:
    """The arm with the learning rates that are tried; none if it names one itself."""
    if "learning_rate=" in arm:
        return []
    base = float(cell_of(cell).config(Path(), Path())["learning_rate"])
    found = (f"{base * factor:.1e}".replace("e-0", "e-").replace(".0e", "e") for factor in FACTORS)
    return [f"{arm}{',' if '@' in arm else '@'}learning_rate={rate}" for rate in found]


def best(results: Results, claim: PaperClaim, arm: str) -> str:
    """The arm at the learning rate that is best for it in the metric of the claim; empty if that is not known yet."""
    tried = rates(claim.cell, arm)
    if not all(results.has(claim.cell, a, seed) for a in (arm, *tried) for seed in SEEDS):
        return ""
    ahead = {
        a: d.mean
        for a in tried
        if (d := difference(results, claim.cell, a, arm, claim.metric, claim.better, claim.budget, seeds=SEEDS))
    }
    found = max(ahead, key=ahead.__getitem__, default=arm)
    return found if ahead.get(found, 0.0) > 0 else arm


def again(results: Results, claim: PaperClaim, lost: str, tuned: str) -> Difference | None:
    """The difference of a claim with the arm that lost at another learning rate."""
    c = replace(claim, than=tuned) if lost == claim.than else replace(claim, arm=tuned)
    return difference(results, c.cell, c.label, c.than, c.metric, c.better, c.budget, c.least)


def missing(results: Results, claim: PaperClaim, lost: str, seeds: Sequence[int]) -> list[Waiting]:
    """The runs that are made next: those of the search, then those of the tuned arm on the seeds of the claim."""
    tuned = best(results, claim, lost)
    if not tuned:
        wanted = [Waiting(claim.cell, a, seed) for seed in SEEDS for a in (lost, *rates(claim.cell, lost))]
    else:
        wanted = [Waiting(claim.cell, tuned, seed) for seed in seeds]
    return [w for w in wanted if not results.has(w.cell, w.arm, w.seed)]
