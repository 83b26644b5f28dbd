"""From differences to what becomes of a claim, and to the matrix of variants and tasks.

p-values are corrected for the number of comparisons (false discovery rate of 5 %, Benjamini and Hochberg). A decided
claim is decided again once the variant that lost has had its learning rate searched
(:mod:`rl_plugins.lab.bench.search`), and stands only if it is decided then, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from scipy import stats

from rl_plugins.lab.bench import search
from rl_plugins.lab.bench.claims import DECIDED, LOOKS, PaperClaim
from rl_plugins.lab.bench.differences import ALPHA, Difference, difference
from rl_plugins.lab.bench.results import Results
from rl_plugins.lab.bench.tasks import TASKS

Verdict = Literal["confirmed", "refuted", "undecided", "not run", "failed", "not tested"]
Mark = Literal["better", "worse", "no significant difference", "failed", "not run"]


@dataclass(frozen=True)
class ClaimResult:
    """A claim and what became of it.

    Attributes:
        found: the difference at the learning rate of the task.
        lost: the variant that lost, where the claim is decided by that difference; else empty.
        tuned: that variant at the learning rate that was best for it; empty if it was not searched.
        again: the difference with `tuned`; None where it was not searched, or the task's learning rate was best.
    """

    claim: PaperClaim
    verdict: Verdict
    found: Difference | None = None
    error: str = ""
    lost: str = ""
    tuned: str = ""
    again: Difference | None = None


def adjusted(ps: Iterable[float]) -> list[float]:
    """p-values corrected for their number (Benjamini and Hochberg)."""
    told = list(ps)
    return [float(q) for q in stats.false_discovery_control(told)] if told else []


def decide(results: Results, asked: Sequence[PaperClaim]) -> list[ClaimResult]:
    """The verdict of every claim, corrected for their number."""
    found = [
        difference(results, c.task, c.label, c.than, c.metric, c.better, c.budget, c.least) if c.task else None
        for c in asked
    ]
    verdicts = _verdicts(found)
    lost: dict[int, str] = {}
    tuned: dict[int, str] = {}
    again: dict[int, Difference] = {}
    for i, verdict in verdicts.items():
        if verdict in DECIDED:
            claim = asked[i]
            lost[i] = claim.label if verdict == "refuted" else claim.than
            best = search.best(results, claim, lost[i])
            if best == lost[i]:
                tuned[i] = best
            elif best and (d := search.again(results, claim, lost[i], best)) and d.seeds >= LOOKS[0]:
                tuned[i], again[i] = best, d
    then = _verdicts([again.get(i, d) for i, d in enumerate(found)])
    out = []
    for i, claim in enumerate(asked):
        error = failure(results, claim.task, claim.label)
        verdict = verdicts.get(i, "not tested" if claim.untested else "failed" if error else "not run")
        if i in again and then[i] != verdict:
            verdict = "undecided"
        out.append(ClaimResult(claim, verdict, found[i], error, lost.get(i, ""), tuned.get(i, ""), again.get(i)))
    return out


def _verdicts(found: Sequence[Difference | None]) -> dict[int, Verdict]:
    """Index -> verdict, of those that were run with enough seeds."""
    run = {i: d for i, d in enumerate(found) if d is not None and d.seeds >= LOOKS[0]}
    yes, no = adjusted(d.above for d in run.values()), adjusted(d.below for d in run.values())
    return {
        i: "refuted" if q_no < ALPHA / 2 else "confirmed" if q_yes < ALPHA / 2 else "undecided"
        for i, q_yes, q_no in zip(run, yes, no, strict=True)
    }


def failure(results: Results, task: str, variant: str) -> str:
    """The error of a variant whose runs all failed; else empty."""
    runs = [run for (c, a, _), run in results.runs.items() if (c, a) == (task, variant)]
    return runs[0].error if runs and all(run.error for run in runs) else ""


@dataclass(frozen=True)
class MatrixPlace:
    """One place of the matrix: a variant in a task against GRPO, in the metric of the task at equal steps."""

    mark: Mark
    found: Difference | None = None


def matrix(results: Results, variants: Sequence[str], than: str = "grpo") -> dict[tuple[str, str], MatrixPlace]:
    """(variant, task) -> place, for what was run; corrected for the number of places."""
    found: dict[tuple[str, str], Difference] = {}
    out: dict[tuple[str, str], MatrixPlace] = {}
    for task in TASKS.values():
        for variant in variants:
            if failure(results, task.name, variant):
                out[variant, task.name] = MatrixPlace("failed")
            elif d := difference(results, task.name, variant, than, task.metric):
                found[variant, task.name] = d
    two_sided = adjusted(min(2 * min(d.above, d.negative), 1.0) for d in found.values())
    for (key, d), q in zip(found.items(), two_sided, strict=True):
        mark: Mark = (
            "no significant difference" if q >= ALPHA or d.seeds < LOOKS[0] else "better" if d.mean > 0 else "worse"
        )
        out[key] = MatrixPlace(mark, d)
    return out
