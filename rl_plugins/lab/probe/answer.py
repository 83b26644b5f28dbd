"""From a pool to the answer: how far each candidate gets per rollout, beside the run without methods."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from rl_plugins.core.errors import ConfigError, RLPluginsError
from rl_plugins.lab.probe.candidates import Candidate, Host
from rl_plugins.lab.quality.drive import Driver, Estimate, QualityVariant
from rl_plugins.lab.quality.variants import BASELINE
from rl_plugins.tools.gradient_quality.pools import Crossed, Interval, Pool, ahead, along, crossed, ratio

FOLDS = 8
BATCHES = 32  # of each fold
SCALES = (0.25, 1, 4, 16)  # of the run's batch
ALIKE = 1.25  # an interval inside 1 / ALIKE to ALIKE says that there is no difference worth a choice


@dataclass(frozen=True)
class Measured:
    """A variant on a pool.

    Attributes:
        generated, tokens: of a batch, on average.
        signal: share of the groups with an advantage that is not 0. effective: (sum |A|)^2 / sum A^2, per trained
            rollout: 1 where all advantages have the same size. spread: variance of the advantages.
    """

    crossed: Crossed
    estimates: Sequence[np.ndarray[Any, Any]]
    generated: float
    tokens: float
    signal: float
    effective: float
    spread: float


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
    ahead: Mapping[str, Interval] = field(default_factory=dict)
    verdict: Mapping[str, str] = field(default_factory=dict)
    ratios: Mapping[str, Mapping[int, Interval]] = field(default_factory=dict)
    generated: float = 1.0
    tokens: float = 1.0
    signal: float = 0.0
    effective: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True)
class Answer:
    """
    Attributes:
        rollouts: of a batch of the run. measured: of one that was measured; other sizes follow from it, as noise falls
            with their number.
        unclear: targets for which the pool does not tell the baseline's progress from 0, so there are no ratios.
    """

    rollouts: int
    measured: int
    targets: Sequence[str]
    unclear: Sequence[str]
    lines: Sequence[Line]

    def plain(self) -> dict[str, Any]:
        return asdict(self)


def batch_of(pool: Pool, host: Host) -> int:
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


def measure(folds: Sequence[Pool], variant: QualityVariant, rollouts: int, k: int, seed: int = 0) -> Measured:
    """Batches of a variant in every fold.

    Raises:
        RLPluginsError: it cannot act on the pool.
    """
    estimates, generated, tokens, rows = [], [], [], list[tuple[float, float, float]]()
    for number, fold in enumerate(folds):
        driver = Driver(fold, variant, rollouts, 1000 * seed + number)
        driver.warm()
        made = [driver.batch() for _ in range(BATCHES)]
        estimates.append(np.stack([m.gradient for m in made]))
        generated.append(float(np.mean([m.generated for m in made])))
        tokens.append(float(np.mean([m.tokens for m in made])))
        rows += [row_figures(m) for m in made]
    signal, effective, spread = np.mean(rows, axis=0)
    found = crossed(estimates, generated, [fold.gradients(k) for fold in folds])
    cost = float(np.mean(generated)), float(np.mean(tokens))
    return Measured(found, estimates, *cost, float(signal), float(effective), float(spread))


def row_figures(made: Estimate) -> tuple[float, float, float]:
    """`signal`, `effective` and `spread` of `Measured`, of one batch."""
    trained = ~np.isnan(made.advantages)
    a, number = made.advantages[trained], np.unique(made.group, return_inverse=True)[1]
    moved = np.zeros(number.max() + 1, bool)
    np.logical_or.at(moved, number[trained], a != 0)
    square = float((a**2).sum())
    effective = float(np.abs(a).sum() ** 2 / square / len(a)) if square else 0.0
    return float(moved.mean()), effective, float(a.var()) if len(a) else 0.0


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Warnings of methods are about runs."""
    log = logging.getLogger("rl_plugins")
    level = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def answer(
    pool: Pool, host: Host, candidates: Sequence[Candidate], k: int = 8, seed: int = 0, track: Any = iter
) -> Answer:
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
    return Answer(host.rollouts, rollouts, targets, unclear, lines)


def _line(
    candidate: Candidate,
    base: Measured,
    folds: Sequence[Pool],
    rollouts: int,
    of_run: int,
    unclear: Sequence[str],
    k: int,
    seed: int,
) -> Line:
    tried, refused = list[tuple[QualityVariant, Measured]](), ""
    for variant in candidate.settings:
        try:
            with quiet():
                tried.append((variant, measure(folds, variant, rollouts, k, seed)))
        except RLPluginsError as e:
            refused = str(e).splitlines()[0]
    if not tried:
        return Line(candidate.name, why_not=refused)
    judged: Sequence[int] = range(FOLDS)
    if len(tried) > 1:
        half, judged = range(0, FOLDS, 2), range(1, FOLDS, 2)
        tried.sort(key=lambda t: -ahead(t[1].crossed, base.crossed, "reward", of_run, half).value)
    variant, found = tried[0]
    same = all(np.array_equal(a, b) for a, b in zip(found.estimates, base.estimates, strict=True))
    if not found.crossed.square.any():
        return Line(candidate.name, why_not="it trained nothing in batches of fresh, whole rollouts.")
    if same and candidate.name != BASELINE:
        return Line(candidate.name, why_not="it changed nothing in batches of fresh, whole rollouts.")
    of, than = found.crossed, base.crossed
    ratios = {
        t: {max(1, round(of_run * s)): ratio(of, than, t, of_run * s, judged) for s in SCALES}
        for t in than.along
        if t not in unclear
    }
    leads = {t: ahead(of, than, t, of_run, judged) for t in than.along}
    verdicts = {t: _verdict(along(of, t, judged), lead, ratios.get(t, {}).get(of_run)) for t, lead in leads.items()}
    return Line(
        candidate.name,
        variant.label.partition(", ")[2] if variant.methods else "",
        "",
        leads,
        verdicts,
        ratios,
        found.generated / base.generated,
        found.tokens / base.tokens,
        found.signal,
        found.effective,
        found.spread,
    )


def _verdict(own: Interval, lead: Interval, relative: Interval | None) -> str:
    if relative is not None and relative.low >= 1 / ALIKE and relative.high <= ALIKE:
        return "alike"
    if own.high < 0:
        return "harmful"
    return "more" if lead.low > 0 else "less" if lead.high < 0 else "unclear"
