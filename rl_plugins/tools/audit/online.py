"""Part C of an audit, during training: which features of prompts go with rewards that are turned around.

C1, majority sign: s = mean reward of a group's most frequent answer - mean reward of its other answers. A healthy
reward has E[s] > 0 where the policy is better than chance; one that is turned around has E[s] < 0. It needs no right
answers.
C2, shadow check: e = 1 where the reward and an independent verifier disagree about most checked rollouts of a group.
C3, drift: CUSUM of the mean of s and of the correlation of reward and verifier.

All statistics are counts per feature, hashed into 2^20 buckets, of at most `most` features, over the last window/2 to
window groups: when window/2 groups are complete they become the older half, and the half before them is forgotten.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from rl_plugins.tools.audit.rows import Row, normal, oddities, scalars_of, text_of, words_of

BUCKETS = 1 << 20
SOURCES = 64  # sources that are told apart, by hash
NAMES = 1000  # features whose text is kept
PERMUTATIONS = 10_000
FEW = 30  # groups below which the permutation test must agree
ODDS = 3.0  # odds ratio from which errors of a feature are told
SUMS = ("n", "sum", "squares", "checked", "errors")  # columns of the counts
_AT_ONCE = 2_000_000  # random numbers of a permutation test that are drawn at a time

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


# ---- features of prompts


def features_of(row: Row) -> list[str]:
    """What a prompt has: words, pairs of words, strange characters, short column values, its length, the system prompt.

    Each stands here once.
    """
    raw = text_of(row)
    words = words_of(normal(raw))
    found = dict.fromkeys(words)
    found |= dict.fromkeys(f"{a} {b}" for a, b in itertools.pairwise(words))
    found |= dict.fromkeys(f"<{what}>" for what in oddities(raw))
    found |= dict.fromkeys(f"{name} = {value!r}" for name, value in scalars_of(row).items())
    found[f"<about {2 ** (round(2 * math.log2(len(raw) + 1)) / 2):.0f} characters>"] = None
    prompt = row["prompt"]
    if not isinstance(prompt, str):
        system = [m for m in prompt if isinstance(m, Mapping) and m.get("role") == "system"]
        if system:
            found[f"<system prompt {zlib.crc32(str(system[0].get('content')).encode()):08x}>"] = None
    return list(found)


def buckets_of(features: Sequence[str]) -> Ints:
    """The bucket of each feature."""
    return np.array([zlib.crc32(f.encode()) % BUCKETS for f in features], dtype=np.int64)


def source_of(row: Row, column: str) -> int:
    """Number of the row's source; 0 without such a column."""
    value = scalars_of(row).get(column) if column else None
    return 0 if value is None else 1 + zlib.crc32(str(value).encode()) % (SOURCES - 1)


# ---- majority signs


def majority_signs(group: Tensor, answers: Sequence[str | None], reward: Tensor, groups: int) -> Tensor:
    """(groups,) s of every group; NaN where no answer is the most frequent one, or all answers are alike.

    Args:
        group: (rollouts,) number of each rollout's group.
        answers: final answer of each; None: it has none, and does not count.
        reward: (rollouts,); NaN does not count.
    """
    out = np.full(groups, np.nan)
    r = reward.numpy()
    use = np.flatnonzero(~np.isnan(r) & np.array([a is not None for a in answers], dtype=bool))
    if not len(use):
        return torch.from_numpy(out)
    _, code = np.unique(np.array([answers[i] for i in use.tolist()]), return_inverse=True)
    g, r = group.numpy()[use], r[use]
    width = int(code.max()) + 1
    pair, place, count = np.unique(g * width + code, return_inverse=True, return_counts=True)
    of = pair // width  # group of each pair of group and answer
    most = np.zeros(groups, dtype=np.int64)
    np.maximum.at(most, of, count)
    leads = count == most[of]
    alone = np.bincount(of, weights=leads, minlength=groups) == 1
    several = np.bincount(of, minlength=groups) > 1
    own = leads[place.ravel()]
    with np.errstate(invalid="ignore", divide="ignore"):
        inside = np.bincount(g[own], weights=r[own], minlength=groups) / np.bincount(g[own], minlength=groups)
        outside = np.bincount(g[~own], weights=r[~own], minlength=groups) / np.bincount(g[~own], minlength=groups)
    defined = alone & several
    out[defined] = (inside - outside)[defined]
    return torch.from_numpy(out)


# ---- counts per feature


def empty(window: int) -> dict[str, Any]:
    """The statistics of a run without groups: plain data.

    `keys` are bucket * 64 + source, sorted; `counts` (keys, 5) the sums of `SUMS`; each for the newer and the older
    half of the window. `signs` and `sources` are s and source of the last `window` groups.
    """
    half = {"keys": torch.zeros(0, dtype=torch.int64), "counts": torch.zeros(0, len(SUMS), dtype=torch.float64)}
    total = torch.zeros(len(SUMS), dtype=torch.float64)
    return {
        "newer": {**half, "total": total},
        "older": {**half, "total": total.clone()},
        "signs": torch.zeros(0, dtype=torch.float64),
        "sources": torch.zeros(0, dtype=torch.int64),
        "names": {},
    }


@dataclass(frozen=True)
class PromptFeatures:
    """Features of the groups of a batch.

    Args:
        features: of each group.
        buckets: of each feature of each group. source: (groups,).
    """

    features: Sequence[Sequence[str]]
    buckets: Sequence[Ints]
    source: Ints

    @classmethod
    def of(cls, rows: Sequence[Row], source_column: str) -> PromptFeatures:
        """Of the rows of the groups' prompts."""
        features = [features_of(row) for row in rows]
        sources = np.array([source_of(row, source_column) for row in rows], dtype=np.int64)
        return cls(features, [buckets_of(f) for f in features], sources)

    def with_any(self, buckets: Sequence[int]) -> NDArray[np.bool_]:
        """(groups,) whether a group has one of these buckets."""
        return np.array([bool(np.isin(b, buckets).any()) for b in self.buckets], dtype=bool)


def add(
    state: Mapping[str, Any], prompts: PromptFeatures, s: Tensor, checks: Tensor, window: int, most: int
) -> dict[str, Any]:
    """The statistics with the groups of a batch.

    Args:
        s: (groups,) majority signs, NaN where undefined.
        checks: (groups, 2) 1 where a group was checked, and 1 where the verifier disagrees.
        most: keys that are kept; those of the fewest groups go first.
    """
    known = ~torch.isnan(s)
    value = torch.where(known, s, 0.0)
    rows = torch.stack([known.double(), value, value * value, *checks.double().T], dim=1).numpy()
    lengths = [len(b) for b in prompts.buckets]
    flat = np.concatenate([*prompts.buckets, np.zeros(0, dtype=np.int64)])
    of = np.repeat(np.arange(len(lengths)), lengths)
    newer = state["newer"]
    keys = np.concatenate([newer["keys"].numpy(), flat * SOURCES + prompts.source[of]])
    counts = np.concatenate([newer["counts"].numpy(), rows[of]])
    keys, place = np.unique(keys, return_inverse=True)
    summed = np.stack([np.bincount(place.ravel(), counts[:, k], len(keys)) for k in range(len(SUMS))], axis=1)
    if len(keys) > most:
        stay = np.sort(np.argsort(-(summed[:, 0] + summed[:, 3]), kind="stable")[:most])
        keys, summed = keys[stay], summed[stay]
    total = newer["total"] + torch.from_numpy(rows.sum(axis=0))
    half = {"keys": torch.from_numpy(keys), "counts": torch.from_numpy(summed), "total": total}
    signs = torch.cat([state["signs"], s[known]])[-window:]
    sources = torch.cat([state["sources"], torch.from_numpy(prompts.source)[known]])[-window:]
    found = {**state, "newer": half, "signs": signs, "sources": sources}
    if float(total[0]) >= window / 2:
        found |= {"older": half, "newer": empty(window)["newer"]}
    return found | {"names": _names(found, prompts)}


def _names(state: Mapping[str, Any], prompts: PromptFeatures) -> dict[str, str]:
    """Bucket -> text of the features with the lowest mean sign and the most errors, as far as they were seen."""
    table = FeatureCounts.of(state)
    names = dict(state["names"])
    for features, buckets in zip(prompts.features, prompts.buckets, strict=True):
        names.update(zip(map(str, buckets.tolist()), features, strict=True))
    if len(names) <= NAMES:
        return names
    seen = np.array([int(b) for b in names], dtype=np.int64)
    place = np.searchsorted(table.bucket, seen).clip(max=max(len(table.bucket) - 1, 0))
    low = table.score[place] if len(table.bucket) else np.zeros(len(seen))
    first = np.argsort(low, kind="stable")[:NAMES]
    texts = list(names.items())
    return dict(texts[i] for i in sorted(first.tolist()))


@dataclass(frozen=True)
class FeatureCounts:
    """Counts of both halves of the window, over all sources.

    Args:
        bucket: (features,) sorted.
        sums: (features, 5) of each.
        total: (5,) of all groups.
        by_source: keys and counts with the sources told apart.
    """

    bucket: Ints
    sums: Floats
    total: Floats
    by_source: tuple[Ints, Floats]

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> FeatureCounts:
        halves = [state["newer"], state["older"]]
        keys = np.concatenate([h["keys"].numpy() for h in halves])
        counts = np.concatenate([h["counts"].numpy() for h in halves])
        bucket, place = np.unique(keys // SOURCES, return_inverse=True)
        sums: Floats = np.stack(
            [np.bincount(place.ravel(), counts[:, k], len(bucket)) for k in range(len(SUMS))], axis=1
        )
        total: Floats = np.sum([h["total"].numpy() for h in halves], axis=0)
        return cls(bucket, sums, total, (keys, counts))

    @property
    def score(self) -> Floats:
        """(features,) the lower, the more suspicious: sum of signs - errors."""
        return self.sums[:, 1] - self.sums[:, 4]

    def of_sources(self, bucket: int) -> dict[int, int]:
        """Source -> groups with a sign, of one feature."""
        keys, counts = self.by_source
        found: dict[int, int] = {}
        for i in np.flatnonzero(keys // SOURCES == bucket).tolist():
            source = int(keys[i] % SOURCES)
            found[source] = found.get(source, 0) + int(counts[i, 0])
        return {source: n for source, n in found.items() if n}


# ---- tests


@dataclass(frozen=True)
class Flag:
    """A feature that a test calls suspicious.

    Args:
        bucket: of the feature. name: its text, or the number of its bucket.
        groups: that have it, and have a sign (C1) or were checked (C2).
        mean: of s (C1), or share of errors (C2).
        q: corrected p-value.
    """

    bucket: int
    name: str
    groups: int
    mean: float
    q: float


def inverted_features(state: Mapping[str, Any], n_min: int, alpha: float, rng: np.random.Generator) -> list[Flag]:
    """C1: features whose mean sign is negative and lower than that of random groups. They may be honest: on hard
    prompts the most frequent answer may be wrong."""
    table = FeatureCounts.of(state)
    total, groups, s = table.total, table.sums[:, 0], table.sums[:, 1]
    if total[0] < 2 * n_min:
        return []
    mu = total[1] / total[0]
    variance = total[2] / total[0] - mu * mu
    use = np.flatnonzero((groups >= n_min) & (groups <= total[0] / 2))
    if variance <= 1e-12 * max(total[2] / total[0], 1e-300) or not len(use):
        return []
    mean = s[use] / groups[use]
    from scipy import stats  # takes longer to load than all methods

    z = (mean - mu) / np.sqrt(variance * (1 - groups[use] / total[0]) / groups[use])
    q = stats.false_discovery_control(stats.norm.cdf(z), method="bh")
    found = []
    for i in np.flatnonzero((q < alpha) & (mean < 0)).tolist():
        bucket, n = int(table.bucket[use[i]]), int(groups[use[i]])
        if n < FEW and permutation_p(state, table.of_sources(bucket), float(mean[i]), rng) >= alpha:
            continue
        found.append(Flag(bucket, _name(state, bucket), n, float(mean[i]), float(q[i])))
    return found


def permutation_p(
    state: Mapping[str, Any], of_sources: Mapping[int, int], mean: float, rng: np.random.Generator
) -> float:
    """Share of random draws of as many groups from the same sources whose mean sign is as low."""
    signs, sources = state["signs"].numpy(), state["sources"].numpy()
    total, n = np.zeros(PERMUTATIONS), 0
    for source, k in sorted(of_sources.items()):
        pool = signs[sources == source]
        k = min(k, len(pool))
        total += drawn_sums(pool, k, rng)
        n += k
    if not n:
        return 1.0
    return float((1 + np.count_nonzero(total / n <= mean + 1e-12)) / (1 + PERMUTATIONS))


def drawn_sums(pool: Floats, k: int, rng: np.random.Generator) -> Floats:
    """(PERMUTATIONS,) sums of k different members of the pool."""
    if not k:
        return np.zeros(PERMUTATIONS)
    if len(pool) > 2 * k * k:  # few draws have a member twice: those are drawn once more
        chosen = np.sort(rng.integers(0, len(pool), (PERMUTATIONS, k)), axis=1)
        while len(twice := np.flatnonzero((np.diff(chosen, axis=1) == 0).any(axis=1))):
            chosen[twice] = np.sort(rng.integers(0, len(pool), (len(twice), k)), axis=1)
        return np.asarray(pool[chosen].sum(axis=1))
    parts = []
    step = max(1, _AT_ONCE // len(pool))
    for start in range(0, PERMUTATIONS, step):
        keys = rng.random((min(step, PERMUTATIONS - start), len(pool)))
        parts.append(pool[np.argpartition(keys, k - 1, axis=1)[:, :k]].sum(axis=1))
    return np.concatenate(parts)


def disagreeing_features(state: Mapping[str, Any], n_min: int, alpha: float) -> list[Flag]:
    """C2: features about whose groups the verifier disagrees with the reward more often than about others (one-sided
    Fisher exact test)."""
    table = FeatureCounts.of(state)
    n, errors = table.sums[:, 3], table.sums[:, 4]
    checked, wrong = table.total[3], table.total[4]
    use = np.flatnonzero((n >= n_min) & (n <= checked / 2))
    if not len(use) or not wrong:
        return []
    from scipy import stats

    n, errors = n[use], errors[use]
    p = stats.hypergeom.sf(errors - 1, int(checked), int(wrong), n)
    q = stats.false_discovery_control(np.clip(p, 0.0, 1.0), method="bh")
    rest = checked - n, wrong - errors
    odds = (errors + 0.5) * (rest[0] - rest[1] + 0.5) / ((n - errors + 0.5) * (rest[1] + 0.5))
    return [
        Flag(b := int(table.bucket[use[i]]), _name(state, b), int(n[i]), float(errors[i] / n[i]), float(q[i]))
        for i in np.flatnonzero((q < alpha) & (odds > ODDS)).tolist()
    ]


def _name(state: Mapping[str, Any], bucket: int) -> str:
    return str(state["names"].get(str(bucket), f"<feature {bucket}>"))


# ---- drift

WARM_UP = 10  # batches whose mean is the reference
SLACK, LIMIT = 0.5, 5.0  # of the CUSUM, in standard deviations


def start_drift() -> dict[str, float]:
    """The state of a CUSUM: batches so far, their mean while it warms up, and the cumulative negative deviation."""
    return {"batches": 0.0, "reference": 0.0, "sum": 0.0}


def drift(state: Mapping[str, float], value: float, deviation: float) -> tuple[dict[str, float], bool]:
    """The CUSUM with the value of a batch, and whether it alarms; it begins again after an alarm.

    The reference is the mean of the first batches, and at least 0: from a run whose rewards are turned around from the
    beginning every batch deviates.

    Args:
        deviation: standard deviation of such a value.
    """
    n, reference, total = state["batches"], state["reference"], state["sum"]
    if n < WARM_UP:
        reference = (reference * n + value) / (n + 1)
    if deviation > 0:
        total = max(0.0, total + (max(reference, 0.0) - value) / deviation - SLACK)
    alarm = bool(total > LIMIT)
    return {"batches": n + 1, "reference": reference, "sum": 0.0 if alarm else total}, alarm
