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

from rl_plugins.cards.claims import ClaimVerdict, PaperClaim, claim_verdict
from rl_plugins.cards.results import Verdict, verdict_of
from rl_plugins.lab.bench import search
from rl_plugins.lab.bench.claims import DECIDED, LOOKS
from rl_plugins.lab.bench.differences import Difference, difference
from rl_plugins.lab.bench.results import Results
from rl_plugins.lab.bench.tasks import TASKS

Mark = Verdict | Literal["failed", "not run"]


@dataclass(frozen=True)
class Stage:
    """A difference of a claim, and its p-values corrected for the number of claims, see :class:`Difference`."""

    found: Difference
    above: float
    below: float


@dataclass(frozen=True)
class ClaimResult:
    """A claim and what became of it.

    Attributes:
        stage: the runs at the learning rate of the task; None with too few.
        few: the difference where there are too few runs for a verdict.
        error: the error of the runs, where all failed.
        lost: the variant that lost, where the claim is decided by that difference; else empty.
        tuned: that variant at the learning rate that was best for it; empty if it was not searched.
        again: the runs with `tuned`; None where it was not searched, or the task's learning rate was best.
    """

    claim: PaperClaim
    stage: Stage | None = None
    few: Difference | None = None
    error: str = ""
    lost: str = ""
    tuned: str = ""
    again: Stage | None = None

    @property
    def found(self) -> Difference | None:
        """The difference at the learning rate of the task."""
        return self.stage.found if self.stage else self.few

    @property
    def stages(self) -> list[Stage]:
        return [stage for stage in (self.stage, self.again) if stage]

    @property
    def verdict(self) -> ClaimVerdict:
        return claim_verdict([(s.above, s.below) for s in self.stages], self.error, self.claim.untested)

    @property
    def p(self) -> float:
        """Two-sided p-value of the test that decides on this side of zero, corrected; the larger one of two stages."""
        above = self.stages[0].found.mean > 0
        return min(1.0, 2 * max(s.above if above else s.below for s in self.stages))


def adjusted(ps: Iterable[float]) -> list[float]:
    """p-values corrected for their number (Benjamini and Hochberg)."""
    told = list(ps)
    return [float(q) for q in stats.false_discovery_control(told)] if told else []


def decide(results: Results, asked: Sequence[PaperClaim]) -> list[ClaimResult]:
    """What became of every claim, corrected for their number."""
    found = [
        difference(results, c.task, c.label, c.than, c.metric, c.better, c.budget, c.least) if c.task else None
        for c in asked
    ]
    first = _stages(found)
    lost: dict[int, str] = {}
    tuned: dict[int, str] = {}
    again: dict[int, Difference] = {}
    for i, stage in first.items():
        claim, verdict = asked[i], claim_verdict([(stage.above, stage.below)])
        if verdict in DECIDED:
            lost[i] = claim.label if verdict == "refuted" else claim.than
            best = search.best(results, claim, lost[i])
            if best == lost[i]:
                tuned[i] = best
            elif best and (d := search.again(results, claim, lost[i], best)) and d.seeds >= LOOKS[0]:
                tuned[i], again[i] = best, d
    then = _stages([again.get(i, d) for i, d in enumerate(found)])
    return [
        ClaimResult(
            claim,
            first.get(i),
            None if i in first else found[i],
            failure(results, claim.task, claim.label),
            lost.get(i, ""),
            tuned.get(i, ""),
            then[i] if i in again else None,
        )
        for i, claim in enumerate(asked)
    ]


def _stages(found: Sequence[Difference | None]) -> dict[int, Stage]:
    """Index -> corrected p-values, of those that were run with enough seeds."""
    run = {i: d for i, d in enumerate(found) if d is not None and d.seeds >= LOOKS[0]}
    ps = [adjusted(getattr(d, name) for d in run.values()) for name in ("above", "below")]
    return {i: Stage(d, *p) for (i, d), *p in zip(run.items(), *ps, strict=True)}


def failure(results: Results, task: str, variant: str) -> str:
    """The error of a variant whose runs all failed; else empty."""
    runs = [run for (c, a, _), run in results.runs.items() if (c, a) == (task, variant)]
    return runs[0].error if runs and all(run.error for run in runs) else ""


@dataclass(frozen=True)
class MatrixPlace:
    """One place of the matrix: a variant in a task against GRPO, in the metric of the task at equal steps.

    `p` is two-sided and corrected for the number of places.
    """

    mark: Mark
    found: Difference | None = None
    p: float | None = None


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
        few = d.seeds < LOOKS[0]
        mark: Mark = "no significant difference" if few else verdict_of(d.low, d.high, "higher", p=q)
        out[key] = MatrixPlace(mark, d, q)
    return out
