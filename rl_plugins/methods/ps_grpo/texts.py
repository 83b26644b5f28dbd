"""Similarities of texts: BLEU-1, BLEU-2, ROUGE-L, token F1 and equality, of all texts of a set with each other.

sacrebleu (add-k smoothing, order 2) has the same BLEU up to 4e-16, and takes 60 times as long, pair by pair.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Ids = NDArray[np.int64]

TOKEN = re.compile(r"\w+|[^\w\s]")
KINDS = ("bleu1", "bleu2", "rougeL", "f1", "em")
_BLOCK = 1 << 22  # entries of a temporary array at most: 16 to 32 MB


def tokens_of(text: str) -> list[str]:
    """Lower-case words and single punctuation marks."""
    return TOKEN.findall(text.lower())


class Vocabulary:
    """Texts as numbers of their tokens. Every text is tokenized once."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}
        self._texts: dict[str, Ids] = {}

    def __call__(self, text: str) -> Ids:
        """(tokens,) int64."""
        if text not in self._texts:
            ids = self._ids
            self._texts[text] = np.array([ids.setdefault(t, len(ids)) for t in tokens_of(text)], dtype=np.int64)
        return self._texts[text]


class Texts:
    """Texts that are compared with each other. In a matrix, [i, j] has the hypothesis i and the reference j. A text
    without a token is similar to none, itself included.

    Args:
        tokens: of each text, as numbers.
    """

    def __init__(self, tokens: Sequence[Ids]) -> None:
        self.tokens = tokens
        self.length = np.array([len(t) for t in tokens], dtype=np.int64)
        self.row = np.repeat(np.arange(len(tokens)), self.length)
        flat = np.concatenate([*tokens, np.empty(0, dtype=np.int64)])
        self.words, self.ids = np.unique(flat, return_inverse=True)

    def similarity(self, kind: str) -> Matrix:
        """(texts, texts) in [0, 1]."""
        if kind in ("bleu1", "bleu2"):
            found = self._bleu(int(kind[-1]))
        elif kind == "em":
            found = self.equal()
        else:
            common = self.common if kind == "f1" else self._subsequence()
            found = 2 * common / np.maximum(self.length[:, None] + self.length, 1)
        return np.where((self.length > 0)[:, None] & (self.length > 0), found, 0.0)

    # ---- the measures

    def _bleu(self, order: int) -> Matrix:
        """Geometric mean of the clipped precisions of orders 1 to `order`, the second smoothed by adding 1, times the
        brevity penalty."""
        hypothesis, reference = np.maximum(self.length, 1)[:, None], self.length
        score = self.common / hypothesis
        if order == 2:
            pairs = self._common(self.ids[:-1] * len(self.words) + self.ids[1:], self.row[:-1] == self.row[1:])
            score = np.sqrt(score * (pairs + 1) / hypothesis)  # a text of l tokens has l - 1 pairs
        return np.asarray(score * np.exp(np.minimum(0.0, 1 - reference / hypothesis)))

    def equal(self) -> Matrix:
        """1 where the tokens are the same, in the same order; two texts without a token are."""
        numbers: dict[bytes, int] = {}
        same = np.array([numbers.setdefault(t.tobytes(), len(numbers)) for t in self.tokens], dtype=np.int64)
        return np.asarray(same[:, None] == same, dtype=np.float64)

    # ---- counts

    @cached_property
    def common(self) -> Matrix:
        """(texts, texts) tokens in common, each as often as in the text that has it less often."""
        return self._common(self.ids, np.ones(len(self.ids), dtype=bool))

    def _common(self, grams: Ids, valid: NDArray[np.bool_]) -> Matrix:
        """(texts, texts) sum over n-grams of the smaller of the two counts.

        The k-th occurrence of an n-gram is a feature of its own. A text has it or not, so the sum is the number of
        features in common, a product of matrices of 0 and 1.

        Args:
            grams: (places,) number of the n-gram at each place.
            valid: (places,) False where it would reach over the end of a text.
        """
        size = len(self.length)
        row, grams = self.row[: len(grams)][valid], grams[valid]
        if not len(grams):
            return np.zeros((size, size))
        order = np.lexsort((row, grams))
        row, grams = row[order], grams[order]
        at = np.arange(len(row))
        first = np.append(True, (row[1:] != row[:-1]) | (grams[1:] != grams[:-1]))
        occurrence = at - np.maximum.accumulate(np.where(first, at, 0))
        feature = np.unique(grams * (int(self.length.max()) + 1) + occurrence, return_inverse=True)[1]
        order = np.argsort(feature, kind="stable")
        row, feature = row[order], feature[order]
        found = np.zeros((size, size))
        width = max(1, _BLOCK // size)
        for begin in range(0, int(feature[-1]) + 1, width):
            low, high = np.searchsorted(feature, (begin, begin + width))
            has = np.zeros((size, min(width, int(feature[-1]) + 1 - begin)), dtype=np.float32)
            has[row[low:high], feature[low:high] - begin] = 1.0
            found += has @ has.T
        return found

    def _subsequence(self) -> Matrix:
        """(texts, texts) length of the longest common subsequence."""
        from rapidfuzz.distance import LCSseq  # the extra `rouge`
        from rapidfuzz.process import cdist

        texts = [t.tolist() for t in self.tokens]
        return np.asarray(cdist(texts, texts, scorer=LCSseq.similarity, dtype=np.float64))
