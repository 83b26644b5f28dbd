"""Similarity of texts: the cosine of their TF-IDF vectors."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence

Words = Mapping[str, int]


def words(text: str) -> Counter[str]:
    """Words and numbers of a text, in lower case, with how often each occurs."""
    return Counter(re.findall(r"\w+", text.lower()))


def tfidf_cosine(query: Words, documents: Sequence[Words]) -> list[float]:
    """Cosine of the TF-IDF vectors of a text and of each of some documents, in [0, 1].

        tf-idf = count (1 + log((1 + D) / (1 + d)))        d of the D documents have the word

    A text without words is like none.
    """
    seen = Counter(word for document in documents for word in document)
    idf = {word: 1 + math.log((1 + len(documents)) / (1 + d)) for word, d in seen.items()}
    unseen = 1 + math.log(1 + len(documents))

    def weights(text: Words) -> dict[str, float]:
        return {word: count * idf.get(word, unseen) for word, count in text.items()}

    def norm(vector: Mapping[str, float]) -> float:
        return math.sqrt(sum(x * x for x in vector.values())) or 1.0

    ours = weights(query)
    length = norm(ours)
    found = []
    for document in documents:
        theirs = weights(document)
        common = sum(x * theirs[word] for word, x in ours.items() if word in theirs)
        found.append(common / length / norm(theirs))
    return found
