"""The tree of one prompt: grown token by token, on tokens that were decoded ahead.

Where a row does not branch, its next token depends on that row alone, so a request fetches many tokens at once.
Capacity, pruning and the end of the tree depend on all rows and are replayed in the order of the paper's loop."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rl_plugins import Generate, MethodError, Prompt, Trajectory
from rl_plugins.core.requests import UNKNOWN, BranchOrigin, Generated, Kind, Pruned
from rl_plugins.methods.latr.params import LatrParams


@dataclass(frozen=True)
class Place:
    """The next place of a row: the token that was decoded there, and the most likely ones with their log-probs."""

    token: int
    logprob: float
    version: int
    top: tuple[tuple[int, float], ...]
    sampled: bool

    @property
    def best(self) -> int:
        return self.top[0][0] if self.sampled else self.token

    def candidates(self, params: LatrParams) -> list[tuple[int, int]]:
        """(rank, token) of those that open a branch here, the most likely first."""
        others = [(token, math.exp(p)) for token, p in self.top if token != self.best][: params.candidates - 1]
        best = math.exp(self.top[0][1])
        return [(rank, token) for rank, (token, p) in enumerate(others) if params.branches(best, p)]


@dataclass(eq=False)
class Branch:
    """A row of the tree. Its tokens up to `born` are its parent's; the one in that place is not. `chance` is the
    probability of that one. `like`: how it is like its parent, if that was found."""

    parent: Branch | None = None
    born: int = 0
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    ahead: deque[Place] = field(default_factory=deque)
    finished: bool = False
    chance: float = UNKNOWN
    like: tuple[float, str] | None = None

    def extend(self, token: int, logprob: float, version: int, eos: Sequence[int]) -> None:
        self.tokens.append(token)
        self.logprobs.append(logprob)
        self.versions.append(version)
        self.finished = token in eos

    def child(self, token: int, eos: Sequence[int]) -> Branch:
        """A branch that takes another token in the next place."""
        new = Branch(self, len(self.tokens), self.tokens[:], self.logprobs[:], self.versions[:])
        new.extend(token, UNKNOWN, self.ahead[0].version, eos)
        new.chance = next((math.exp(p) for other, p in self.ahead[0].top if other == token), UNKNOWN)
        return new

    def advance(self, sampled: bool, eos: Sequence[int]) -> None:
        """Takes the next token: the sampled one or the most likely one."""
        place = self.ahead.popleft()
        if not sampled and place.token != place.best:
            self.ahead.clear()  # what was decoded ahead follows another token
        token, logprob = (place.token, place.logprob) if sampled else (place.best, UNKNOWN)
        self.extend(token, logprob, place.version, eos)

    def trajectory(self, start: Trajectory) -> Trajectory:
        return replace(
            start,
            tokens=(*start.tokens, *self.tokens),
            kinds=(*start.kinds, *(int(Kind.FORCED if math.isnan(p) else Kind.SAMPLED) for p in self.logprobs)),
            logprobs=(*start.logprobs, *self.logprobs),
            versions=(*start.versions, *self.versions),
            finish="eos" if self.finished else "",
        )


@dataclass
class Tree:
    """A tree and what it took.

    Attributes:
        branches: alive, in order of birth, the root first.
        tests, pruned: comparisons of a branch with its parent, and how many found them alike.
        gone: those that were pruned, in the order they went.
        decoded: tokens the engine made.
    """

    branches: list[Branch] = field(default_factory=lambda: [Branch()])
    tests: int = 0
    pruned: int = 0
    decoded: int = 0
    gone: list[Branch] = field(default_factory=list)

    @property
    def used(self) -> int:
        """Decoded tokens that are in the tree. The first token of a branch was not decoded for it."""
        return sum(len(b.tokens) - (0 if b.parent is None else b.born + 1) for b in self.branches)

    @property
    def length(self) -> int:
        return max(len(b.tokens) for b in self.branches)

    def origins(self, before: int) -> list[BranchOrigin]:
        """For the trace: where each branch comes from, and those that were pruned from it.

        Args:
            before: tokens before the tree.
        """
        number = {id(b): k for k, b in enumerate(self.branches)}
        pruned: dict[int, list[Pruned]] = {}
        for b in self.gone:
            upper = b  # the branch below the one that is still there
            while upper.parent is not None and id(upper.parent) not in number:
                upper = upper.parent
            score, why = b.like or (UNKNOWN, "grew on a branch that was pruned")
            one = Pruned(before + upper.born, tuple(b.tokens[upper.born :]), score, why)
            pruned.setdefault(number[id(upper.parent)], []).append(one)
        return [
            BranchOrigin(
                None if b.parent is None else number[id(b.parent)],
                before + b.born,
                b.chance,
                "" if b.parent is None else "probability of its first token",
                tuple(pruned.get(k, ())),
            )
            for k, b in enumerate(self.branches)
        ]


def grow(prompt: Prompt, params: LatrParams, n: int) -> Generator[Any, Any, Tree]:
    """Grows a tree of at most n branches (`yield from` it). An engine that gives no token ends it."""
    tree, start, eos = Tree(), prompt.start(), prompt.chat.eos
    room = prompt.room(start)
    limit = room if params.max_tree_tokens is None else min(room, params.max_tree_tokens)
    horizon = 0  # up to where all rows are decoded ahead
    for place in range(limit):
        rows = tree.branches
        running = [b for b in rows if not b.finished]
        if not running:
            break
        horizon = min(place + params.decode_ahead, limit) if place >= horizon else horizon
        hungry = [b for b in running if not b.ahead]
        sampled = params.samples(len(rows), n)
        if not (yield from _decode(tree, hungry, start, params, horizon - place, sampled)):
            break

        kept = _within_capacity(rows, n, params)
        children: list[Branch] = []
        sampling: list[Branch] = []
        for row in running:
            children += [row.child(token, eos) for token in kept.get(id(row), ())]
            if id(row) not in kept and params.samples(len(rows) + len(children), n):
                sampling.append(row)
        # rows that were decoded ahead as argmax before the tree was full
        stale = [b for b in sampling if not b.ahead[0].sampled]
        if not (yield from _decode(tree, stale, start, params, horizon - place, True)):
            break
        for row in running:
            row.advance(row in sampling, eos)
        tree.branches = rows = rows + children

        _prune(tree, params, place + 1)
        settled = all(place - b.born > max(params.lookahead) for b in tree.branches)
        if params.stop_when_full and settled and params.full(len(tree.branches), n, place / room):
            break
    return tree


def _decode(
    tree: Tree, rows: Sequence[Branch], start: Trajectory, params: LatrParams, tokens: int, sampled: bool
) -> Generator[Any, Any, bool]:
    """Decodes rows ahead; False if one of them got nothing."""
    temperature = None if sampled else 0.0
    answers: list[list[Generated]] = yield [
        Generate(row.trajectory(start), max_tokens=tokens, temperature=temperature, top=params.candidates)
        for row in rows
    ]
    for row, (made,) in zip(rows, answers, strict=True):
        if len(made.top) < len(made.tokens):
            raise MethodError(
                f"the engine reports no most likely tokens for {len(made.tokens) - len(made.top)} of "
                f"{len(made.tokens)} tokens, and the tree branches on them. Use an engine that reports "
                f"{params.candidates} log-probs per token."
            )
        tree.decoded += len(made.tokens)
        columns = zip(made.tokens, made.logprobs, made.top, strict=True)
        row.ahead = deque(Place(token, p, made.version, top, made.sampled) for token, p, top in columns)
    return all(row.ahead for row in rows)


def _within_capacity(rows: Sequence[Branch], n: int, params: LatrParams) -> dict[int, list[int]]:
    """id of a row -> tokens it branches into: second choices of all rows in their order, then third choices and so on,
    as many as fit into n together with the rows themselves."""
    slots = [
        (rank, i, token)
        for i, row in enumerate(rows)
        if not row.finished
        for rank, token in row.ahead[0].candidates(params)
    ]
    kept: dict[int, list[int]] = {}
    for _, i, token in sorted(slots)[: n - len(rows)]:
        kept.setdefault(id(rows[i]), []).append(token)
    return kept


def _prune(tree: Tree, params: LatrParams, now: int) -> None:
    """Removes branches that are still like their parents, with all that grew on them. Every test comes first."""
    gone: set[int] = set()
    for b in tree.branches:
        if b.parent is None or now - b.born not in params.lookahead or b.finished or b.parent.finished:
            continue
        tree.tests += 1
        b.like = params.likeness(b.tokens[b.born :], b.parent.tokens[b.born :])
        if b.like is not None:
            tree.pruned += 1
            gone.add(id(b))
    for b in tree.branches:  # parents come before their children
        if b.parent is not None and id(b.parent) in gone:
            gone.add(id(b))
    tree.gone += [b for b in tree.branches if id(b) in gone]
    tree.branches = [b for b in tree.branches if id(b) not in gone]
