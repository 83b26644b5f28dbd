"""Sets of wordings: those of the dataset, and the rollouts of one in a batch, which are compared with each other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_plugins import ConfigError, MethodError
from rl_plugins.core.errors import shown
from rl_plugins.methods.ps_grpo.texts import Ids, Matrix, Texts, Vocabulary


@dataclass(frozen=True)
class Sets:
    """Which rows of the dataset are wordings of the same question.

    Args:
        number: (rows,) set of each row, counted in the order of the dataset.
        size: (sets,) wordings.
        rows: (rows,) those of the first set, then of the second, and so on.
        ends: (sets,) where each ends there.
    """

    number: Ids
    size: Ids
    rows: Ids
    ends: Ids

    @classmethod
    def of(cls, values: Sequence[Any], column: str) -> Sets:
        """
        Raises:
            ConfigError: a row names no set.
        """
        empty = next((i for i, value in enumerate(values) if value is None), None)
        if empty is not None:
            raise ConfigError(
                f"row {empty} of the dataset has no value in the column `{column}`, so it belongs to no set. Give it "
                f"one, or remove the row."
            )
        number = numbered(values, column)
        size = np.bincount(number)
        return cls(number, size, np.argsort(number, kind="stable"), np.cumsum(size))

    def members(self, sets: Ids) -> Ids:
        """Rows of these sets, one set after the other."""
        parts = [self.rows[self.ends[i] - self.size[i] : self.ends[i]] for i in sets]
        return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def numbered(values: Sequence[Any], column: str) -> Ids:
    """(values,) number of each value, in the order of their first appearance; None is never the same as another."""
    numbers: dict[Hashable, int] = {}
    try:
        found = [numbers.setdefault((i,) if v is None else (0, v), len(numbers)) for i, v in enumerate(values)]
    except TypeError:
        wrong = next(v for v in values if not isinstance(v, Hashable))
        raise MethodError(
            f"the column `{column}` has the value {shown(wrong)}; it must be a text or a number that names the set. "
            f"Change the column, or method_params.ps_grpo.set_column."
        ) from None
    return np.array(found, dtype=np.int64)


@dataclass(frozen=True)
class Compared:
    """The rollouts of a set in a batch.

    Args:
        rows: (rollouts,) their places in the batch.
        text: (rollouts,) number of the text of each.
        texts: the different ones.
        weight: (rollouts, rollouts) share of each other one in the mean.
    """

    rows: Ids
    text: Ids
    texts: list[str]
    weight: Matrix

    def mean(self, similarity: Matrix) -> Matrix:
        """(rollouts,) consistency; NaN for those that are compared with none.

        Args:
            similarity: (texts, texts).
        """
        r = np.minimum((self.weight * similarity[np.ix_(self.text, self.text)]).sum(1), 1.0)
        return np.where(self.weight.any(1), r, np.nan)

    def pairs(self, known: NDArray[np.bool_]) -> Ids:
        """(pairs, 2) different pairs of texts that are compared.

        Args:
            known: (texts,) False for those without a token, which are never compared.
        """
        left, right = np.nonzero(self.weight)
        both = np.stack([self.text[left], self.text[right]], axis=1)
        return np.unique(both[known[both].all(1)], axis=0)

    def accuracy(self, answers: Sequence[Sequence[str]], vocabulary: Vocabulary) -> Matrix:
        """(rollouts,) token F1 to the best of each rollout's answers; 0 without an answer."""
        golds = {gold: i for i, gold in enumerate(dict.fromkeys(g for several in answers for g in several))}
        count = len(self.texts)
        f1 = Texts([vocabulary(text) for text in (*self.texts, *golds)]).similarity("f1")[:count, count:]
        row = np.repeat(np.arange(len(answers)), [len(several) for several in answers])
        gold = np.array([golds[g] for several in answers for g in several], dtype=np.int64)
        best = np.zeros(len(answers))
        np.maximum.at(best, row, f1[self.text[row], gold])
        return best

    def most_frequent(self, vocabulary: Vocabulary) -> bytes:
        """The tokens of the answer that most rollouts give."""
        answers = [vocabulary(text).tobytes() for text in self.texts]
        different = {answer: i for i, answer in enumerate(dict.fromkeys(answers))}
        counts = np.bincount(np.array([different[a] for a in answers])[self.text])
        return list(different)[int(counts.argmax())]


def weights(
    wording: Ids, kappa: int | None = None, s: int | None = None, rng: np.random.Generator | None = None
) -> Matrix:
    """(rollouts, rollouts) share of every rollout j of a set in the reward of rollout i; 0 for the own wording.

    Every wording has the same share, and so has every rollout of a wording.

    Args:
        wording: (rollouts,) sorted.
        kappa, s: size of the sample, with `rng`; without, all other wordings and all of their rollouts.
    """
    number, count = np.unique(wording, return_inverse=True, return_counts=True)[1:]
    other = np.arange(len(count)) != number[:, None]  # (rollouts, wordings)
    chosen = other[:, number]
    if rng is not None and kappa is not None and s is not None:
        draw = np.where(other, rng.random(other.shape), np.inf)
        other &= draw.argsort(axis=1).argsort(axis=1) < kappa
        shuffled = np.argsort(number + rng.random(chosen.shape), axis=1)  # inside every wording
        place = np.arange(len(number)) - (np.cumsum(count) - count)[number]
        first = np.empty_like(chosen)
        np.put_along_axis(first, shuffled, np.broadcast_to(place < s, chosen.shape), axis=1)
        chosen = other[:, number] & first
        count = np.minimum(count, s)
    total = other.sum(1, keepdims=True) * count[number]
    return np.where(chosen, 1 / np.maximum(total, 1), 0.0)
