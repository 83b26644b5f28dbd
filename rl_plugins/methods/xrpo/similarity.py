"""Similarity of texts: the cosine of their TF-IDF vectors."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

Words = Mapping[str, int]
Floats = NDArray[np.float64]


def words(text: str) -> Counter[str]:
    """Words and numbers of a text, in lower case, with how often each occurs."""
    return Counter(re.findall(r"\w+", text.lower()))


def tfidf_cosine(queries: Sequence[Words], documents: Sequence[Words], own: Sequence[int | None]) -> Floats:
    """(queries, documents) cosine of the TF-IDF vectors of texts and of some documents, in [0, 1].

        tf-idf = count (1 + log((1 + D) / (1 + d)))        d of the D documents have the word

    A text without words is like none.

    Args:
        own: place among the documents of each query, which is then none of its documents: its cosine with itself is 0,
            and it does not count in D and d. None: the query is not among them.
    """
    number: dict[str, int] = {}
    texts = [*documents, *queries]
    word = [number.setdefault(w, len(number)) for text in texts for w in text]
    counts = _rows([n for text in texts for n in text.values()], word, [len(text) for text in texts], len(number))
    corpus, asked = counts[: len(documents)], counts[len(documents) :]
    having = np.bincount(corpus.indices, minlength=len(number))
    found = np.zeros((len(queries), len(documents)))
    apart = np.array([place is None for place in own])
    found[apart] = _cosine(asked[apart], corpus, having, len(documents))
    for i, place in enumerate(own):
        if place is not None:
            others = having - np.bincount(asked[[i]].indices, minlength=len(number))
            found[i] = _cosine(asked[[i]], corpus, others, len(documents) - 1)[0]
            found[i, place] = 0.0
    return found


def _cosine(queries: Any, corpus: Any, having: NDArray[np.int64], count: int) -> Floats:
    """Cosines of rows of word counts.

    Args:
        having: of the `count` documents, how many have each word.
    """
    weight = 1 + np.log((1 + count) / (1 + having))
    ours, theirs = (_unit(counts.multiply(weight[None]).tocsr()) for counts in (queries, corpus))
    cosines: Floats = (ours @ theirs.T).toarray()
    return cosines


def _unit(rows: Any) -> Any:
    """Rows of length 1, or of 0."""
    length = np.sqrt(np.asarray(rows.multiply(rows).sum(axis=1)).ravel())
    rows.data /= np.repeat(length, np.diff(rows.indptr))
    return rows


def _rows(values: Sequence[int], columns: Sequence[int], lengths: Sequence[int], width: int) -> Any:
    from scipy.sparse import csr_array

    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return csr_array((np.array(values, dtype=float), np.array(columns, np.int64), starts), (len(lengths), width))
