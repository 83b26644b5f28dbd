"""Trees of rollouts: the nodes on the way to each row, and the tokens that belong to them.

A row that ends a branch notes its way from the root as plain data, `rollouts.meta["branches"]`:

    {"nodes": [0, 2, 5], "stops": [0, 8, 20]}

Entry d is its node of depth d, and the position after that node's last token. The first 8 tokens of this row
belong to node 2, and the rows whose way has node 2 share them. The rows of a group are one tree, in which every node
has a number of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins import Groups, MethodError, Rollouts, Tokens
from rl_plugins.core.errors import shown
from rl_plugins.core.groups import joint, places
from rl_plugins.core.requests import BranchOrigin

COLUMN = "branches"


def note(nodes: Sequence[int], stops: Sequence[int]) -> dict[str, list[int]]:
    """What a row notes of its way."""
    return {"nodes": list(nodes), "stops": list(stops)}


def origins_of(nodes: Sequence[Sequence[int]], stops: Sequence[Sequence[int]]) -> list[BranchOrigin]:
    """For the trace: each row parted from the first one with which it shares the longest way."""
    found: list[BranchOrigin] = []
    first: dict[tuple[int, ...], int] = {}  # a beginning of a way -> the first row on it
    for row, (way, ends) in enumerate(zip(nodes, stops, strict=True)):
        shared = max((d for d in range(1, len(way) + 1) if tuple(way[:d]) in first), default=0)
        parent = first.get(tuple(way[:shared]))
        found.append(
            BranchOrigin(parent, ends[shared - 1] if shared else 0, why="" if parent is None else "a given place")
        )
        for d in range(1, len(way) + 1):
            first.setdefault(tuple(way[:d]), row)
    return found


def shares(rollouts: int, branches: int) -> list[int]:
    """Rollouts of each branch, as equal as can be, the larger ones first."""
    return [rollouts // branches + (i < rollouts % branches) for i in range(branches)]


@dataclass(frozen=True)
class Trees:
    """The trees of a batch. Their nodes are numbered by tree, depth and first row, whatever the order of the rows.

    An entry is a node on the way of a row. Entries lie row by row, from the root on.

    Attributes:
        row, node: (entries,) int64.
        tree, depth: (nodes,) int64.
        parent: (nodes,) int64, -1 of a root.
        size: (nodes,) int64 tokens of one copy.
        token_node: (tokens,) int64, -1 for a token of no node.
        slot: (tokens,) int64, equal for the copies of a token; -1 for a token of no node.
        order: (rows,) int64 rank of each row. Of rows that share a token, the lowest one counts as the first.
    """

    row: Tensor
    node: Tensor
    tree: Tensor
    depth: Tensor
    parent: Tensor
    size: Tensor
    token_node: Tensor
    slot: Tensor
    order: Tensor

    @classmethod
    def of(cls, rollouts: Rollouts, tokens: Tokens) -> Trees | None:
        """None if no row has noted its way.

        Raises:
            MethodError: a note that cannot be read, or ways that form no tree.
        """
        rows, ways = _ways(rollouts)
        if not rows:
            return None
        length = torch.tensor([way.shape[1] for way in ways])
        given, stop = torch.from_numpy(np.concatenate(ways, axis=1))
        row = torch.repeat_interleave(torch.tensor(rows), length)
        depth = places(length)
        start = torch.where(depth == 0, 0, stop.roll(1))
        _refuse_backward(rollouts, row, start, stop)
        tree = Groups(rollouts.group[row]).index
        number = joint(tree, given)
        parent = torch.where(depth == 0, -1, number.roll(1))
        one = torch.zeros(int(number.max()) + 1, dtype=torch.int64).scatter_(0, number, torch.arange(len(number)))
        for fact in (depth, parent, start, stop):
            _refuse_unequal(rollouts, row, fact != fact[one][number])
        order = _order(rollouts)
        by_row = Groups(number, count=len(one)).min(order[row].double()).long()
        sorted_ = torch.from_numpy(np.lexsort((by_row.numpy(), depth[one].numpy(), tree[one].numpy())))
        renumbered = torch.argsort(sorted_)
        one, number = one[sorted_], renumbered[number]
        size = (stop - start)[one]
        entry = _entries(tokens, row, start, stop)
        inside = entry >= 0
        first = torch.cumsum(size, 0) - size  # slot of each node's first token
        return cls(
            row=row,
            node=number,
            tree=tree[one],
            depth=depth[one],
            parent=torch.where(parent[one] < 0, -1, renumbered[parent[one].clamp(min=0)]),
            size=size,
            token_node=torch.where(inside, number[entry], -1),
            slot=torch.where(inside, first[number[entry]] + tokens.position - start[entry], -1),
            order=order,
        )

    @property
    def count(self) -> int:
        """Number of nodes."""
        return len(self.tree)

    @cached_property
    def nodes(self) -> Groups:
        """Statistics per node over entries."""
        return Groups(self.node, count=self.count)

    @cached_property
    def children(self) -> Tensor:
        """(nodes,) int64 number of children."""
        return torch.bincount(self.parent[self.parent >= 0], minlength=self.count)

    @cached_property
    def last_split(self) -> Tensor:
        """(trees,) int64 largest depth of a node with several children; -1 if there is none."""
        split = torch.where(self.children > 1, self.depth, -1)
        return Groups(self.tree, count=int(self.tree.max()) + 1).max(split.double()).long()

    def copies(self, live: Tensor, tokens: Tokens) -> tuple[Tensor, Tensor]:
        """(tokens,) bool, whether a token is the first of its live copies, and (tokens,) int64 how many there are.
        A token of no node is the first, and the only one, if it is live.

        Args:
            live: (tokens,) bool.
        """
        inside = live & (self.slot >= 0)
        slot, rank = self.slot[inside], self.order[tokens.row[inside]]
        total = int(self.size.sum())
        best = torch.full((total,), len(self.order)).scatter_reduce_(0, slot, rank, "amin")
        first, copies = live.clone(), live.long()
        first[inside] = rank == best[slot]
        copies[inside] = torch.bincount(slot, minlength=total)[slot]
        return first, copies


def _ways(rollouts: Rollouts) -> tuple[list[int], list[np.ndarray[Any, np.dtype[np.int64]]]]:
    """Rows that noted their way, and (2, depths) node numbers and stops of each."""
    notes = rollouts.meta.get(COLUMN, ())
    rows = [i for i, way in enumerate(notes) if way is not None]
    ways = []
    for i in rows:
        try:
            ways.append(np.array([notes[i]["nodes"], notes[i]["stops"]], dtype=np.int64).reshape(2, -1))
        except (KeyError, TypeError, ValueError, IndexError):
            raise MethodError(_unreadable(notes[i])) from None
        if not ways[-1].shape[1]:
            raise MethodError(_unreadable(notes[i]))
    return rows, ways


def _unreadable(way: Any) -> str:
    return (
        f"A row has {shown(way, 80)} in the column `{COLUMN}`. It must have a node and a stop of each depth: "
        f'{{"nodes": [0, 2], "stops": [0, 8]}}. Let `branch_text_rollout` or `branch_rollout` make the rollouts, or '
        f"note the branches in this form."
    )


def _refuse_backward(rollouts: Rollouts, row: Tensor, start: Tensor, stop: Tensor) -> None:
    wrong = (stop < start).nonzero()[:, 0]
    if len(wrong):
        way: Mapping[str, Any] = rollouts.meta[COLUMN][int(row[wrong[0]])]
        raise MethodError(
            f"A row has the stops {shown(way['stops'], 80)} in the column `{COLUMN}`. They are positions after the "
            f"last token of each node, at least 0, and must not fall. Correct the stops."
        )


def _refuse_unequal(rollouts: Rollouts, row: Tensor, differs: Tensor) -> None:
    wrong = differs.nonzero()[:, 0]
    if len(wrong):
        way = rollouts.meta[COLUMN][int(row[wrong[0]])]
        raise MethodError(
            f"The rows of a tree do not fit together: {shown(way, 120)} has a node that another row has at another "
            f"depth, under another node, or with other tokens. Give every node of a tree a number of its own in the "
            f"column `{COLUMN}`."
        )


def _order(rollouts: Rollouts) -> Tensor:
    """(rows,) rank: rows with a reward first, then by the number of the rollout."""
    missing = torch.isnan(rollouts.reward)
    keys = (rollouts.index, rollouts.rollout, rollouts.group, missing)
    return torch.argsort(torch.from_numpy(np.lexsort([key.numpy() for key in keys])))


def _entries(tokens: Tokens, row: Tensor, start: Tensor, stop: Tensor) -> Tensor:
    """(tokens,) the entry each token belongs to, -1 if none."""
    width = 1 + max(int(stop.max()), int(tokens.position.max()) if len(tokens) else 0)
    keys = row * width + start  # of several entries that begin in the same place, the last one has the tokens
    entry = torch.searchsorted(keys, tokens.row * width + tokens.position, right=True) - 1
    found = entry.clamp(min=0)
    inside = (entry >= 0) & (row[found] == tokens.row) & (tokens.position < stop[found])
    return torch.where(inside, entry, -1)
