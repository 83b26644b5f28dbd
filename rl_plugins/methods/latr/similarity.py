"""Similarity of two windows of tokens: edit distance, longest common subsequence, longest shared suffix."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def edit_distance(a: Sequence[int], b: Sequence[int]) -> int:
    """Insertions, deletions and substitutions that turn `a` into `b` (Levenshtein)."""
    other, places = np.asarray(b, dtype=np.int64), np.arange(len(b) + 1)
    row = places
    for i, token in enumerate(a, 1):
        new = np.empty_like(row)
        new[0] = i
        new[1:] = np.minimum(row[1:] + 1, row[:-1] + (other != token))
        row = np.minimum.accumulate(new - places) + places  # insertions, from the left
    return int(row[-1])


def common_subsequence(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest common subsequence."""
    other = np.asarray(b, dtype=np.int64)
    row = np.zeros(len(b) + 1, dtype=np.int64)
    for token in a:
        row[1:] = np.maximum.accumulate(np.maximum(row[1:], row[:-1] + (other == token)))
    return int(row[-1])


def suffix_match(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the longest suffix of `a` that occurs in `b`, or of `b` that occurs in `a`, whichever is longer."""
    return max(_suffix_within(a, b), _suffix_within(b, a))


def _suffix_within(a: Sequence[int], b: Sequence[int]) -> int:
    best = 0
    for end in range(1, len(b) + 1):
        length = 0
        while length < min(end, len(a)) and a[-1 - length] == b[end - 1 - length]:
            length += 1
        best = max(best, length)
    return best
