"""`difficulty_slices` in plain loops, for its own tests and for those in both hosts."""

from __future__ import annotations

import math
from collections.abc import Sequence


def slice_of_each(successes: Sequence[float], heads: int) -> list[int]:
    """The slice of each prompt: the hardest left is taken again and again, the first row of equal ones."""
    left, found = list(range(len(successes))), [0] * len(successes)
    for rank in range(len(successes)):
        best = left[0]
        for i in left[1:]:
            if successes[i] < successes[best]:
                best = i
        left.remove(best)
        found[best] = math.floor(rank * heads / len(successes))
    return found


def own_of_each(sizes: Sequence[int], share: float) -> list[int]:
    """How many prompts of batches of these sizes are of the slice, where it has enough."""
    found, owed = [], 0.0
    for n in sizes:
        whole = math.floor(share * n + owed + 0.5)
        owed += share * n - whole
        found.append(whole)
    return found


def check_slices(
    batches: Sequence[Sequence[int]], successes: Sequence[float], heads: int, head: int, share: float
) -> None:
    """Batches of prompts against the loop: how many are of the slice, and that none comes again too early."""
    slice_ = slice_of_each(successes, heads)
    own = [[i for i in batch if slice_[i] == head] for batch in batches]
    others = [[i for i in batch if slice_[i] != head] for batch in batches]
    assert [len(b) for b in own] == own_of_each([len(b) for b in batches], share)
    for side, members in ((own, [s == head for s in slice_]), (others, [s != head for s in slice_])):
        dealt = [i for batch in side for i in batch]
        # one order after the other; a prompt that a batch had already waits for the next batch
        size = sum(members)
        for begin in range(0, len(dealt) - size + 1, size):
            seen = dealt[begin : begin + size]
            assert len(set(seen)) >= size - max(map(len, side)), seen
        counts = [dealt.count(i) for i, member in enumerate(members) if member]
        assert not counts or max(counts) - min(counts) <= 1 + (max(map(len, side)) > size // 2), counts
    assert all(len(set(batch)) == len(batch) for batch in batches)
