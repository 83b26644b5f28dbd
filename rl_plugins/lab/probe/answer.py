"""From a pool to the answer: how far each candidate gets per rollout, beside the run without methods."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rl_plugins.core.errors import ConfigError, RLPluginsError
from rl_plugins.lab.probe.candidates import HostBatch, ProbedCandidate
from rl_plugins.lab.quality.drive import Driver, Estimate, QualityVariant
from rl_plugins.lab.quality.variants import BASELINE
from rl_plugins.tools.gradient_quality.pools import Crossed, FoldInterval, RolloutPool, ahead, along, crossed, ratio

FOLDS = 8
BATCHES = 32  # of each fold
SCALES = (0.25, 1, 4, 16)  # of the run's batch
ALIKE = 1.25  # an interval inside 1 / ALIKE to ALIKE says that there is no difference worth a choice


@dataclass(frozen=True)
class Shares:
    """What batches are made of, on average.

    Attributes:
        rollouts, tokens: generated, of a batch.
        signal: share of the groups with an advantage that is not 0.
        effective: (sum |A|)^2 / sum A^2, per trained rollout: 1 where all advantages have the same size.
        spread: variance of the advantages.
    """

    rollouts: float
    tokens: float
    signal: float
    effective: float
    spread: float


@dataclass(frozen=True)
class ProbedVariant:
    """The batches of a variant in every fold."""

    variant: QualityVariant
    made: Sequence[Sequence[Estimate]]
    crossed: Crossed

    @property
    def shares(self) -> Shares:
        return Shares(*np.mean([_shares(m) for made in self.made for m in made], axis=0).tolist())

    def idle(self, base: ProbedVariant) -> str:
        """Why nothing can be said of it; empty if something can."""
        mine, other = ([m for made in x.made for m in made] for x in (self, base))
        if not any(np.nan_to_num(m.advantages).any() for m in mine):
            return "it trained nothing in batches of fresh, whole rollouts."
        equal = (
            np.array_equal(a.gradient, b.gradient) and np.array_equal(a.advantages, b.advantages, equal_nan=True)
            for a, b in zip(mine, other, strict=True)
        )
        return "it changed nothing in batches of fresh, whole rollouts." if all(equal) else ""


@dataclass(frozen=True)
class Line:
    """What is said of a candidate.

    Attributes:
        setting: the one that is judged. why_not: why there is nothing to say; the rest is then empty.
        ahead: target -> root of the progress at the run's batch minus the baseline's, up to a factor that all have.
        verdict: target -> "more", "less", "harmful", "alike" or "unclear", at the run's batch.
        ratios: target -> rollouts of a batch -> progress relative to the baseline's, where that is told from 0.
    """

    name: str
    setting: str = ""
    why_not: str = ""
    ahead: Mapping[str, FoldInterval] = field(default_factory=dict)
    verdict: Mapping[str, str] = field(default_factory=dict)
    ratios: Mapping[str, Mapping[int, FoldInterval]] = field(default_factory=dict)
    shares: Shares | None = None


@dataclass(frozen=True)
class ProbeAnswer:
    """
    Attributes:
        rollouts: of a batch of the run. measured: of one that was measured; other sizes follow from it, as noise falls
            with their number.
        reward, solved: means of the pool.
        unclear: targets for which the pool does not tell the baseline's progress from 0, so there are no ratios.
    """

    rollouts: int
    measured: int
    reward: float
    solved: float
    targets: Sequence[str]
    unclear: Sequence[str]
    lines: Sequence[Line]


def batch_of(pool: RolloutPool, host: HostBatch) -> int:
    """Rollouts of a measured batch: the run's, or those of half the prompts of a fold.

    Raises:
        ConfigError: the pool has too few prompts, or too few rollouts of each.
    """
    prompts, each = pool.prob.shape
    if prompts < 2 * FOLDS or each < host.group:
        raise ConfigError(
            f"The pool has {prompts} prompts with {each} rollouts; it takes {2 * FOLDS} prompts or more (--prompts), "
            f"and as many rollouts as the run has per prompt, {host.group} (--rollouts)."
        )
    return min(host.rollouts, host.group * (prompts // FOLDS // 2))


def measure(
    folds: Sequence[RolloutPool], variant: QualityVariant, rollouts: int, k: int, seed: int = 0
) -> ProbedVariant:
    """Batches of a variant in every fold.

    Raises:
        RLPluginsError: it cannot act on the pool.
    """
    if rollouts < variant.group:
        raise ConfigError(f"{variant.group} rollouts of a prompt are more than a measured batch, which has {rollouts}.")
    made = []
    with _quiet():
        for number, fold in enumerate(folds):
            driver = Driver(fold, variant, rollouts, 1000 * seed + number)
            driver.warm()
            made.append([driver.batch() for _ in range(BATCHES)])
    estimates = [np.stack([m.gradient for m in of]) for of in made]
    cost = [float(np.mean([m.generated for m in of])) for of in made]
    return ProbedVariant(variant, made, crossed(estimates, cost, [fold.gradients(k) for fold in folds]))


def _shares(made: Estimate) -> tuple[float, ...]:
    trained = ~np.isnan(made.advantages)
    a, number = made.advantages[trained], np.unique(made.group, return_inverse=True)[1]
    moved = np.bincount(number[trained], a != 0, number.max() + 1) > 0
    square = float((a**2).sum())
    effective = float(np.abs(a).sum() ** 2 / square / len(a)) if square else 0.0
    return made.generated, made.tokens, float(moved.mean()), effective, float(a.var()) if len(a) else 0.0


def measure_all(
    candidate: ProbedCandidate, folds: Sequence[RolloutPool], rollouts: int, k: int, seed: int
) -> tuple[list[ProbedVariant], str]:
    """What could be measured of a candidate, and why a setting could not."""
    found, refused = list[ProbedVariant](), ""
    for variant in candidate.settings:
        try:
            found.append(measure(folds, variant, rollouts, k, seed))
        except RLPluginsError as e:
            refused = str(e).splitlines()[0]
    return found, refused


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Warnings of methods are about runs."""
    log = logging.getLogger("rl_plugins")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def answer(
    pool: RolloutPool,
    host: HostBatch,
    candidates: Sequence[ProbedCandidate],
    k: int = 8,
    seed: int = 0,
    track: Any = iter,
) -> ProbeAnswer:
    """
    Args:
        candidates: the baseline first.
        k: of pass@k.
        track: wraps the candidates, to show how far it is.

    Raises:
        ConfigError: the pool is too small.
    """
    rollouts = batch_of(pool, host)
    folds = [pool.part(range(j, len(pool.prob), FOLDS)) for j in range(FOLDS)]
    base = measure(folds, candidates[0].settings[0], rollouts, k, seed)
    targets = list(base.crossed.along)
    unclear = [t for t in targets if along(base.crossed, t, range(FOLDS)).low <= 0]
    lines = [_line(c, base, folds, rollouts, host.rollouts, unclear, k, seed) for c in track(candidates)]
    reward, solved = float((pool.rewards @ pool.reward_weights).mean()), float(pool.right.mean())
    return ProbeAnswer(host.rollouts, rollouts, reward, solved, targets, unclear, lines)


def _line(
    candidate: ProbedCandidate,
    base: ProbedVariant,
    folds: Sequence[RolloutPool],
    rollouts: int,
    of_run: int,
    unclear: Sequence[str],
    k: int,
    seed: int,
) -> Line:
    tried, refused = measure_all(candidate, folds, rollouts, k, seed)
    if not tried:
        return Line(candidate.name, why_not=refused)
    judged, than = range(FOLDS), base.crossed
    if len(tried) > 1:
        half, judged = range(0, FOLDS, 2), range(1, FOLDS, 2)
        tried.sort(key=lambda m: -ahead(m.crossed, than, "reward", of_run, half).value)
    found, of = tried[0], tried[0].crossed
    if candidate.name != BASELINE and (why := found.idle(base)):
        return Line(candidate.name, why_not=why)
    ratios = {
        t: {max(1, round(of_run * s)): ratio(of, than, t, of_run * s, judged) for s in SCALES}
        for t in than.along
        if t not in unclear
    }
    leads = {t: ahead(of, than, t, of_run, judged) for t in than.along}
    verdicts = {t: _verdict(along(of, t, judged), lead, ratios.get(t, {}).get(of_run)) for t, lead in leads.items()}
    setting = found.variant.label.partition(", ")[2] if found.variant.methods else ""
    return Line(candidate.name, setting, "", leads, verdicts, ratios, found.shares)


def _verdict(own: FoldInterval, lead: FoldInterval, relative: FoldInterval | None) -> str:
    if relative is not None and relative.low >= 1 / ALIKE and relative.high <= ALIKE:
        return "alike"
    if own.high < 0:
        return "harmful"
    of, same = (lead, 0) if relative is None else (relative, 1)
    return "more" if of.low > same else "less" if of.high < same else "unclear"
