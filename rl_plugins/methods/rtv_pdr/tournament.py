"""Recursive tournament voting: who is left when small groups of candidates are compared again and again. Pure.

winner, = rtv(16, judge)                          # judge((3, 7)) -> "2": candidate 7 is better
survivors = yield from rtv_rounds(16, stop=4)     # in a rollout program: yields rounds, is sent votes
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, Literal

from rl_plugins import ConfigError

if TYPE_CHECKING:
    import numpy as np

Group = tuple[int, ...]
Vote = int | None  # a candidate; None: the judge said nothing that could be understood
Rng = Callable[[str], "np.random.Generator"]
"""A fresh generator for a purpose."""


def rtv(
    n: int,
    judge: Callable[[Group], Any],
    *,
    stop: int = 1,
    group_size: int = 2,
    votes: int = 8,
    ties: Literal["random", "first"] = "random",
    unparsable: Literal["discard", "first"] = "discard",
    shuffle: bool = True,
    permute: bool = True,
    rng: Rng | None = None,
) -> list[int]:
    """The candidates that are left, as numbers from 0 to n - 1.

    Args:
        judge: is shown candidates in an order and replies which is best: a number from 1 on, as a number or in a text
            (see `parse_vote`). All votes of a group are asked for before the next group.
        stop: how many are left. group_size: candidates of one comparison. votes: of the judge per comparison. ties:
        between candidates with as many votes: drawn, or the first of the group. unparsable: a reply without a readable
        candidate does not count, or counts for the first of the group. shuffle: candidates are dealt to groups at
        random in every round; else in order. permute: every vote sees its group in a random order; else in the order of
        the group. rng: generators, needed unless nothing is random.

    Raises:
        ConfigError: a number out of range, or no `rng` where something is drawn.
    """
    if (shuffle or permute or ties == "random") and rng is None:
        raise ConfigError(
            'the tournament draws at random and has no `rng`. Give one, or shuffle=False, permute=False, ties="first".'
        )
    rounds = rtv_rounds(n, stop=stop, group_size=group_size, ties=ties, unparsable=unparsable, rng=rng, shuffle=shuffle)
    number, answer = 0, None
    while True:
        try:
            groups = rounds.send(answer)  # type: ignore[arg-type]
        except StopIteration as done:
            return list(done.value)
        answer = [
            [
                preferred(judge(shown), shown)
                for shown in orders(group, votes, rng if permute else None, f"round {number} group {g}")
            ]
            for g, group in enumerate(groups)
        ]
        number += 1


def preferred(reply: Any, shown: Group) -> Vote:
    """The candidate that a judge's reply names."""
    place = parse_vote(reply, len(shown))
    return None if place is None else shown[place]


def rtv_rounds(
    n: int,
    *,
    stop: int = 1,
    group_size: int = 2,
    ties: Literal["random", "first"] = "random",
    unparsable: Literal["discard", "first"] = "discard",
    rng: Rng | None = None,
    shuffle: bool = True,
) -> Generator[list[Group], Sequence[Sequence[Vote]], list[int]]:
    """The rounds of a tournament: yields the groups of a round that are to be compared, is sent the votes of each, and
    returns min(n, stop) survivors.

    A candidate without an opponent advances without a comparison. If the last round leaves fewer than `stop`, the
    losers of that round with the largest share of votes return.

    Raises:
        ConfigError: a number out of range.
    """
    if n < 1 or stop < 1 or group_size < 2:
        raise ConfigError(
            f"a tournament of {n} candidates in groups of {group_size} down to {stop}; there must be at least 1 "
            f"candidate, groups of 2 and 1 survivor."
        )
    left, number = list(range(n)), 0
    while len(left) > stop:
        if shuffle and rng is not None:
            left = [left[i] for i in rng(f"round {number} deal").permutation(len(left))]
        groups = [tuple(left[i : i + group_size]) for i in range(0, len(left), group_size)]
        compared = [group for group in groups if len(group) > 1]
        votes = iter((yield compared))
        left, losers = [], []
        for g, group in enumerate(groups):
            given = list(next(votes)) if len(group) > 1 else []
            counts = Counter(group[0] if v is None and unparsable == "first" else v for v in given)
            most = max(counts[c] for c in group)
            best = [c for c in group if counts[c] == most]
            draw = ties == "random" and rng is not None and len(best) > 1
            winner = best[int(rng(f"round {number} tie {g}").integers(len(best)))] if draw and rng else best[0]
            left.append(winner)
            losers += [(-counts[c] / max(1, len(given)), c) for c in group if c != winner]
        if len(left) < stop:
            left += [c for _, c in sorted(losers, key=lambda x: x[0])[: stop - len(left)]]
        number += 1
    return left


def orders(group: Group, votes: int, rng: Rng | None, purpose: str) -> list[Group]:
    """The order in which each vote sees a group; without `rng` always the same."""
    if rng is None:
        return [group] * votes
    return [tuple(group[i] for i in rng(f"{purpose} vote {v}").permutation(len(group))) for v in range(votes)]


def parse_vote(reply: Any, size: int) -> int | None:
    """The place from 0 on that a reply names, or None.

    A reply is a number from 1 to `size`, or a text with "Best: number" (the last one counts), or a text whose only
    number it is.
    """
    if isinstance(reply, str):
        named = re.findall(r"best[^\w-]*(-?\d+)", reply, re.IGNORECASE)
        if not named:
            named = list(set(re.findall(r"-?\d+", reply)))
            if len(named) != 1:
                return None
        reply = int(named[-1][:20])  # a longer number is no place either
    if isinstance(reply, bool) or not hasattr(reply, "__index__"):
        return None
    place = int(reply) - 1
    return place if 0 <= place < size else None
