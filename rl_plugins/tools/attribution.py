"""Attribution of a score to the parts that brought it: Shapley values and the Banzhaf index (CapaBench, 2502.00510)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from rl_plugins.core.errors import ConfigError, shown

MOST_EXACT = 10  # players; beyond them the 2^n coalitions are sampled
Index = Literal["shapley", "banzhaf"]
Value = Callable[[frozenset[str]], Any]


@dataclass(frozen=True)
class Attribution:
    """What each player brought.

    Attributes:
        players: their names.
        values: (players,) float64.
        error: (players,) standard error of sampling coalitions; 0 where all of them were evaluated. It says nothing of
            the noise of the scores themselves.
        total: v(all players) - v(no player).
        evaluated: number of coalitions whose score was asked for.
    """

    players: tuple[str, ...]
    values: np.ndarray
    error: np.ndarray
    total: float
    evaluated: int

    def __getitem__(self, player: str) -> float:
        return float(self.values[self.players.index(player)])

    @property
    def unexplained(self) -> float:
        """total - sum of the values: 0 for Shapley values, in general not for the Banzhaf index."""
        return float(self.total - self.values.sum())


def coalitions(players: Sequence[str]) -> list[frozenset[str]]:
    """All 2^n subsets. The i-th holds player k if bit k of i is set."""
    _check_names(players)
    return [frozenset(p for k, p in enumerate(players) if i >> k & 1) for i in range(2 ** len(players))]


def needed(
    players: Sequence[str], *, index: Index = "shapley", samples: int | None = None, seed: int = 0
) -> list[frozenset[str]]:
    """The coalitions whose scores `attribute` asks for with these arguments, in the order of their bits."""
    asked: list[frozenset[str]] = []

    def score(coalition: frozenset[str]) -> float:
        asked.append(coalition)
        return 0.0

    attribute(score, players, index=index, samples=samples, seed=seed)
    return sorted(asked, key=lambda s: sum(1 << k for k, p in enumerate(players) if p in s))


def attribute(
    value: Value | Mapping[Collection[str], float],
    players: Sequence[str],
    *,
    index: Index = "shapley",
    samples: int | None = None,
    seed: int = 0,
) -> Attribution:
    """Shapley values or the Banzhaf index of every player.

        phi_i = sum over S without i of  w(S) (v(S + i) - v(S))
        w(S)  = |S|! (n - |S| - 1)! / n!   (Shapley)     1 / 2^(n-1)   (Banzhaf)

    All coalitions are evaluated for n <= 10. Beyond that (or with `samples`) Shapley values are the mean over `samples`
    pairs of a random permutation and its reverse (antithetic: a player that came early then comes late), and the
    Banzhaf index is the mean over pairs of a random coalition and its complement. No coalition is evaluated twice.
    The sampled Shapley values also sum to v(all) - v(none).

    The paper gives Shapley's weights; the authors' five scripts weigh every coalition 1/2^(n-1), so what they print is
    the Banzhaf index, whose sum is not v(all) - v(none). `index="banzhaf"` gives their numbers.

    Args:
        value: score of a coalition (a frozenset of names), or a mapping from coalitions to scores.
        players: their names, all different.
        samples: pairs; None: exact up to 10 players, and 50 n pairs beyond.
        seed: of the sampling.

    Raises:
        ConfigError: names that are not all different, a coalition without a score, or a score that is not finite.

    Source: arXiv 2502.00510; `code/ATP/Coq/shapley_coq.py` (calculate_shapley_values) of zoe-yyx/CapaBench.
    """
    if index not in ("shapley", "banzhaf"):
        raise ConfigError(f"`index` is {shown(index)}. It must be shapley or banzhaf.")
    if samples is not None and samples < 1:
        raise ConfigError(f"`samples` is {samples}. It must be at least 1, or None for all coalitions.")
    _check_names(players)
    v = _Scores(value, players)
    n = len(players)
    if samples is None and n <= MOST_EXACT:
        phi = _exact(np.array([v(i) for i in range(2**n)]), n, index)
        error = np.zeros(n)
    else:
        rng = np.random.default_rng(seed)
        draw = _permutation_pair if index == "shapley" else _coalition_pair
        drawn = np.stack([draw(v, n, rng) for _ in range(samples or 50 * n)]) if n else np.zeros((1, 0))
        phi = drawn.mean(0)
        error = drawn.std(0, ddof=1) / math.sqrt(len(drawn)) if len(drawn) > 1 else np.full(n, math.nan)
    total = v(2**n - 1) - v(0)
    return Attribution(tuple(players), phi, error, total, len(v.known))


@dataclass(frozen=True)
class AttributionInterval:
    """Values over all tasks, with percentile intervals of a bootstrap over tasks.

    The intervals hold the noise of the scores. Where coalitions were sampled, `Attribution.error` has that noise.

    Attributes:
        players: their names.
        values, low, high: (players,) float64.
        level: of the interval, 0.95 for instance.
    """

    players: tuple[str, ...]
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    level: float


def bootstrap(
    scores: Mapping[Collection[str], Sequence[float]],
    players: Sequence[str],
    *,
    index: Index = "shapley",
    samples: int | None = None,
    draws: int = 2000,
    level: float = 0.95,
    seed: int = 0,
) -> AttributionInterval:
    """Values of noisy scores, with intervals by resampling tasks.

    v(S) is the mean of `scores[S]`. The j-th score of every coalition belongs to the same task (or seed), and a draw
    takes the same tasks for all coalitions, so what all coalitions share cancels.

    Args:
        scores: (tasks,) for every coalition in `needed` with the same index, samples and seed.
        samples, seed: as for `attribute`; the seed is also that of the resampling.

    Raises:
        ConfigError: a coalition is missing, numbers of tasks differ, fewer than 2 tasks, more than 10 players without
            `samples`, or a number out of range.
    """
    if not 0 < level < 1:
        raise ConfigError(f"`level` is {level:g}. It must be between 0 and 1, for example 0.95.")
    if draws < 1:
        raise ConfigError(f"`draws` is {draws}. It must be at least 1.")
    if samples is None and len(players) > MOST_EXACT:
        raise ConfigError(
            f"There are {len(players)} players. Intervals without `samples` need all coalitions, so at most "
            f"{MOST_EXACT} players. Give `samples`."
        )
    by_set = {frozenset(s): np.asarray(list(given), np.float64) for s, given in scores.items()}
    subsets = needed(players, index=index, samples=samples, seed=seed)
    missing = [s for s in subsets if s not in by_set]
    if missing:
        raise ConfigError(
            f"There is no score of {_named(missing[0])}. Give one for each of the {len(subsets)} coalitions."
        )
    tasks = {len(by_set[s]) for s in subsets}
    if len(tasks) > 1 or min(tasks) < 2:
        raise ConfigError(f"Coalitions have {sorted(tasks)} scores. Each needs one per task, for the same 2 or more.")
    table = np.stack([by_set[s] for s in subsets])
    if not np.isfinite(table).all():
        raise ConfigError("A score is not finite. Leave its task out of all coalitions.")
    m = table.shape[1]
    if samples is None:  # (players, tasks): the values are linear in the scores
        per_task = _exact(table, len(players), index)
    else:
        tasks_of: list[dict[Collection[str], float]] = [dict(zip(subsets, task, strict=True)) for task in table.T]
        found = [attribute(task, players, index=index, samples=samples, seed=seed) for task in tasks_of]
        per_task = np.stack([f.values for f in found], axis=1)
    rng = np.random.default_rng(seed)
    weights = rng.multinomial(m, np.full(m, 1 / m), size=draws) / m
    low, high = np.quantile(per_task @ weights.T, [(1 - level) / 2, (1 + level) / 2], axis=1)
    return AttributionInterval(tuple(players), per_task.mean(1), low, high, level)


def _exact(v: np.ndarray, n: int, index: Index) -> np.ndarray:
    """(players, ...) from the scores (2^n, ...) of all coalitions, numbered by their bits."""
    numbers = np.arange(2**n)
    size = np.array([int(i).bit_count() for i in numbers])
    if index == "shapley":
        per_size = np.array([1 / (n * math.comb(n - 1, s)) for s in range(n)])
    else:
        per_size = np.full(n, 0.5 ** (n - 1)) if n else np.zeros(0)
    phi = np.zeros((n, *v.shape[1:]))
    for k in range(n):
        without = numbers[numbers >> k & 1 == 0]
        phi[k] = np.tensordot(per_size[size[without]], v[without | 1 << k] - v[without], axes=1)
    return phi


def _permutation_pair(v: _Scores, n: int, rng: np.random.Generator) -> np.ndarray:
    order = rng.permutation(n)
    phi = np.zeros(n)
    for way in (order, order[::-1]):
        inside = 0
        for k in way:
            phi[k] += (v(inside | 1 << int(k)) - v(inside)) / 2
            inside |= 1 << int(k)
    return phi


def _coalition_pair(v: _Scores, n: int, rng: np.random.Generator) -> np.ndarray:
    drawn = int(sum(1 << k for k in np.flatnonzero(rng.random(n) < 0.5)))
    everyone = 2**n - 1
    phi = np.zeros(n)
    for inside in (drawn, everyone ^ drawn):
        for k in range(n):
            phi[k] += (v(inside | 1 << k) - v(inside & ~(1 << k))) / 2
    return phi


@dataclass
class _Scores:
    """v by the bits of a coalition; each is evaluated once."""

    value: Value | Mapping[Collection[str], float]
    players: Sequence[str]
    known: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if isinstance(self.value, Mapping):
            self.table: dict[frozenset[str], Any] | None = {frozenset(s): v for s, v in self.value.items()}
        else:
            self.table = None

    def __call__(self, bits: int) -> float:
        if bits not in self.known:
            self.known[bits] = self._score(frozenset(p for k, p in enumerate(self.players) if bits >> k & 1))
        return self.known[bits]

    def _score(self, coalition: frozenset[str]) -> float:
        if self.table is None:
            assert callable(self.value)
            given = self.value(coalition)
        elif coalition in self.table:
            given = self.table[coalition]
        else:
            raise ConfigError(f"There is no score of {_named(coalition)}. Evaluate it, or leave a player out.")
        try:
            found = float(given)
        except (TypeError, ValueError, OverflowError):
            found = math.nan
        if not math.isfinite(found):
            raise ConfigError(f"The score of {_named(coalition)} is {shown(given)}. It must be a finite number.")
        return found


def _check_names(players: Sequence[str]) -> None:
    twice = sorted({p for p in players if list(players).count(p) > 1})
    if isinstance(players, str) or twice:
        what = shown(players) if isinstance(players, str) else f"named twice: {', '.join(twice)}"
        raise ConfigError(f"`players` is {what}. It must be a list of different names.")


def _named(coalition: Collection[str]) -> str:
    return f"the coalition {{{', '.join(sorted(coalition))}}}"


def synergies(value: Mapping[Collection[str], float], players: Sequence[str]) -> dict[tuple[str, str], float]:
    """v({i, j}) - v({i}) - v({j}) + v({}) of every pair: above 0, two players bring more together than each alone."""
    v = _Scores(value, players)
    pairs = itertools.combinations(range(len(players)), 2)
    return {(players[i], players[j]): v(1 << i | 1 << j) - v(1 << i) - v(1 << j) + v(0) for i, j in pairs}
