"""Part B of an audit: prompts that are nearly equal, and what differs between them.

A prompt is the set of its shingles: runs of five words of the normal text, or single words if it has fewer than eight.
MinHash gives each set 128 numbers. Two sets share about as many of them as their Jaccard index says. Sets that agree in
one of 16 bands of 8 numbers are candidates; those whose exact Jaccard index is at least tau are pairs.
"""

from __future__ import annotations

import difflib
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_plugins.tools.audit.answers import canonical
from rl_plugins.tools.audit.contrast import Contrast
from rl_plugins.tools.audit.findings import Finding
from rl_plugins.tools.audit.rows import DatasetRows, normal, text_of, words_of
from rl_plugins.tools.audit.scoring import RewardCaller

PART = "near-duplicates"
SHINGLE, SHORT = 5, 8
PERMUTATIONS, BANDS = 128, 16
MOST_PAIRS = 100_000
SHOWN_PAIRS = 20
_CHUNK = 1 << 16  # shingles that are hashed at once
_BUCKET = 64  # prompts of a bucket that are all compared; of a larger one each with the first

Words = NDArray[np.uint64]


def shingles(text: str) -> Words:
    """Hashes of the shingles of a prompt, sorted, each once."""
    words = words_of(normal(text))
    codes = np.array([zlib.crc32(w.encode()) for w in words], dtype=np.uint64)
    k = 1 if len(words) < SHORT else SHINGLE
    if len(codes) < k or not len(codes):
        return codes[:0]
    found = np.zeros(len(codes) - k + 1, dtype=np.uint64)
    for i in range(k):  # a polynomial of the words, modulo 2^64
        found = found * np.uint64(0x9E3779B97F4A7C15) + codes[i : i + len(found)] + np.uint64(i + 1)
    return np.unique(found ^ (found >> np.uint64(29)))


def signatures(sets: Sequence[Words], rng: np.random.Generator) -> NDArray[np.uint32]:
    """(sets, 128) MinHash of sets that are not empty."""
    a = rng.integers(1, 1 << 63, (PERMUTATIONS, 1), dtype=np.uint64) * np.uint64(2) + np.uint64(1)
    b = rng.integers(0, 1 << 63, (PERMUTATIONS, 1), dtype=np.uint64)
    out = np.empty((len(sets), PERMUTATIONS), dtype=np.uint32)
    start = 0
    while start < len(sets):
        stop, size = start, 0
        while stop < len(sets) and (stop == start or size + len(sets[stop]) <= _CHUNK):
            size += len(sets[stop])
            stop += 1
        flat = np.concatenate(sets[start:stop])
        hashed = ((flat[None, :] * a + b) >> np.uint64(32)).astype(np.uint32)
        begins = np.cumsum([0, *(len(s) for s in sets[start : stop - 1])])
        out[start:stop] = np.minimum.reduceat(hashed, begins, axis=1).T
        start = stop
    return out


def candidates(signature: NDArray[np.uint32]) -> NDArray[np.int64]:
    """(pairs, 2) sets that agree in a band, the smaller number first, each pair once."""
    found: list[NDArray[np.int64]] = [np.zeros((0, 2), dtype=np.int64)]
    width = PERMUTATIONS // BANDS
    for band in range(BANDS):
        keys = np.ascontiguousarray(signature[:, band * width : (band + 1) * width]).view(f"V{4 * width}")[:, 0]
        _, inverse, counts = np.unique(keys, return_inverse=True, return_counts=True)
        order = np.argsort(inverse.ravel(), kind="stable")
        ends = np.cumsum(counts)
        for size, end in zip(counts[counts > 1].tolist(), ends[counts > 1].tolist(), strict=True):
            members = order[end - size : end]
            if size <= _BUCKET:
                i, j = np.triu_indices(size, 1)
                found.append(np.stack([members[i], members[j]], axis=1))
            else:
                found.append(np.stack([np.full(size - 1, members[0]), members[1:]], axis=1))
    pairs = np.unique(np.concatenate(found), axis=0)
    return pairs[:MOST_PAIRS]


def jaccard(a: Words, b: Words) -> float:
    """Shared members of two sets over all of theirs."""
    both = len(np.intersect1d(a, b, assume_unique=True))
    return both / (len(a) + len(b) - both)


def near_duplicates(texts: Sequence[str], tau: float, rng: np.random.Generator) -> list[tuple[int, int]]:
    """Pairs of places whose texts have a Jaccard index of at least `tau`."""
    sets = [shingles(t) for t in texts]
    full = [i for i, s in enumerate(sets) if len(s)]
    pairs = candidates(signatures([sets[i] for i in full], rng)).tolist() if len(full) > 1 else []
    return [(full[i], full[j]) for i, j in pairs if jaccard(sets[full[i]], sets[full[j]]) >= tau]


def difference(a: str, b: str) -> tuple[list[str], list[str]]:
    """Words of the normal texts that only the first has, and that only the second has."""
    left, right = words_of(normal(a)), words_of(normal(b))
    gone: list[str] = []
    new: list[str] = []
    for op, i, j, k, m in difflib.SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        if op != "equal":
            gone += left[i:j]
            new += right[k:m]
    return gone, new


def same_facts(a: str, b: str) -> bool:
    """Whether two prompts have the same numbers and the same names (words with a capital letter)."""

    def facts(text: str) -> Counter[str]:
        return Counter(re.findall(r"\d[\d.,]*", text)) + Counter(re.findall(r"(?<=[a-z,] )[A-Z]\w*", text))

    return facts(a) == facts(b)


@dataclass(frozen=True)
class Pair:
    """Two prompts that are nearly equal.

    Args:
        rows: their numbers in the dataset.
        differs: words that only one of them has.
        rewards: of the same right answer under both; None where labels differ.
    """

    rows: tuple[int, int]
    differs: tuple[list[str], list[str]]
    rewards: tuple[float, float] | None = None


def findings(
    rows: DatasetRows,
    c: Contrast | None,
    golds: Sequence[str],
    scorer: RewardCaller | None,
    tau: float,
    delta: float,
    seed: int,
) -> Iterator[Finding]:
    """What near-duplicates show.

    Args:
        c: of the same rows; None: no reward function can be called.
        golds: right answers of the rows.
        delta: difference of rewards that is told, as a share of the reward's span.
    """
    texts = [text_of(row) for row in rows]
    pairs = near_duplicates(texts, tau, np.random.default_rng(seed))
    if not pairs:
        return
    labels, opposite, other = [], [], []
    answers = [canonical(g) for g in golds]
    for i, j in pairs if golds else ():
        if c is not None and c.total[i] < 0 < c.total[j]:
            i, j = j, i  # the inverted one is the second
        numbers = rows.numbers[i], rows.numbers[j]
        if answers[i] != answers[j]:
            if same_facts(texts[i], texts[j]):
                labels.append(Pair(numbers, difference(texts[i], texts[j])))
        elif c is not None and scorer is not None:
            found = c.total[i], c.total[j]
            own = float(scorer.total(c.gold[i : i + 1])[0]), float(scorer.total(c.gold[j : j + 1])[0])
            pair = Pair(numbers, difference(texts[i], texts[j]), own)
            limit = delta * c.span
            if found[0] * found[1] < 0 and abs(own[0] - own[1]) >= limit:
                opposite.append(pair)
            elif abs(own[0] - own[1]) >= limit > 0:
                other.append(pair)
    yield Finding("info", PART, "pairs", f"{len(pairs)} pairs of prompts are nearly equal.")
    if labels:
        yield Finding(
            "warn",
            PART,
            "label_conflict",
            f"{len(labels)} pairs of nearly equal prompts have the same numbers and names, and different answers. One "
            f"of the two labels is probably wrong.",
            tuple(dict.fromkeys(n for p in labels for n in p.rows)),
            {"pairs": _plain(labels)},
        )
    if other:
        yield Finding(
            "warn",
            PART,
            "reward_differs",
            f"{len(other)} pairs of nearly equal prompts with the same answer give it different rewards.",
            tuple(dict.fromkeys(n for p in other for n in p.rows)),
            {"pairs": _plain(other)},
        )
    if opposite:
        triggers = candidate_triggers([p.differs for p in opposite])
        told = f" They differ in {', '.join(map(repr, triggers[:8]))}." if triggers else ""
        yield Finding(
            "critical",
            PART,
            "opposite_reward",
            f"{len(opposite)} pairs of nearly equal prompts have the same answer, and the reward prefers it under one "
            f"and a wrong answer under the other.{told}",
            tuple(dict.fromkeys(n for p in opposite for n in p.rows)),
            {"pairs": _plain(opposite), "candidate_triggers": triggers},
        )


def candidate_triggers(differences: Sequence[tuple[list[str], list[str]]], least: int = 2) -> list[str]:
    """Words that differ in at least `least` pairs, and in 80 % of those stand in the second prompt alone."""
    sides: dict[str, list[bool]] = {}
    for gone, new in differences:
        for word in {*gone, *new}:
            sides.setdefault(word, []).append(word in new and word not in gone)
    return sorted(w for w, found in sides.items() if len(found) >= least and np.mean(found) >= 0.8)


def _plain(pairs: Sequence[Pair]) -> list[dict[str, object]]:
    return [
        {"rows": list(p.rows), "only_first": p.differs[0], "only_second": p.differs[1], "rewards": p.rewards}
        for p in pairs[:SHOWN_PAIRS]
    ]
