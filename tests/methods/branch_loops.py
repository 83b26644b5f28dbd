"""BranchGRPO in plain Python: a tree as a dictionary of nodes, one node after the other, for the tests."""

from __future__ import annotations

import math
import statistics
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from rl_plugins.core.rollouts import Rollouts, Tokens
from rl_plugins.testing import make_rollouts, make_tokens

Key = tuple[int, int]  # group, node


@dataclass
class Node:
    depth: int
    parent: Key | None
    tokens: list[float] = field(default_factory=list)  # log-probs, of one copy
    leaves: list[int] = field(default_factory=list)  # rows
    children: list[Key] = field(default_factory=list)


def nodes_of(rollouts: Rollouts, tokens: Tokens) -> dict[Key, Node]:
    """Every node of the batch, in the order of depth and row."""
    logprob = {
        (int(r), int(p)): float(x) for r, p, x in zip(tokens.row, tokens.position, tokens.old_logprobs, strict=True)
    }
    found: dict[Key, Node] = {}
    for row, way in enumerate(rollouts.meta["branches"]):
        if way is None:
            continue
        parent, start = None, 0
        for depth, (number, stop) in enumerate(zip(way["nodes"], way["stops"], strict=True)):
            key = (int(rollouts.group[row]), number)
            if key not in found:
                found[key] = Node(depth, parent, [logprob[row, p] for p in range(start, stop) if (row, p) in logprob])
                if parent is not None:
                    found[parent].children.append(key)
            found[key].leaves.append(row)
            parent, start = key, stop
    return found


def edge(node: Node, how: str) -> float:
    if not node.tokens:
        return 0.0
    return sum(node.tokens) if how == "sum" else sum(node.tokens) / len(node.tokens)


def weighted(values: Sequence[float], logits: Sequence[float]) -> float:
    top = max(logits)
    weights = [math.exp(x - top) for x in logits]
    return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


def value(key: Key, nodes: Mapping[Key, Node], reward: Sequence[float], fusion: str, beta: float, how: str) -> float:
    """V of a node; NaN without a leaf that has a reward."""
    node = nodes[key]
    known = [row for row in node.leaves if not math.isnan(reward[row])]
    if not known:
        return math.nan
    if fusion == "uniform" or (fusion == "levels" and not node.children):
        return sum(reward[row] for row in known) / len(known)
    if fusion == "levels":
        below = [(value(c, nodes, reward, fusion, beta, how), beta * edge(nodes[c], how)) for c in node.children]
        below = [(v, x) for v, x in below if not math.isnan(v)]
        return weighted([v for v, _ in below], [x for _, x in below])
    logits = []
    for row in known:
        end = next(k for k, n in nodes.items() if row in n.leaves and not n.children)
        total = 0.0
        while end != key:
            total += edge(nodes[end], how)
            parent = nodes[end].parent
            assert parent is not None
            end = parent
        logits.append(beta * total)
    return weighted([reward[row] for row in known], logits)


def advantages_by_loops(
    rollouts: Rollouts,
    tokens: Tokens,
    fusion: str = "uniform",
    beta: float = 1.0,
    how: str = "mean",
    eps: float = 1e-8,
    clip: float = 5.0,
) -> dict[Key, float]:
    """A of every node."""
    nodes, reward = nodes_of(rollouts, tokens), rollouts.reward.tolist()
    values = {key: value(key, nodes, reward, fusion, beta, how) for key in nodes}
    out = {}
    for key, node in nodes.items():
        peers = [values[k] for k, n in nodes.items() if k[0] == key[0] and n.depth == node.depth]
        peers = [v for v in peers if not math.isnan(v)]
        std = statistics.stdev(peers) if len(peers) > 1 else 0.0
        known = not math.isnan(values[key]) and std >= 1e-6
        a = (values[key] - statistics.fmean(peers)) / (std + eps) if known else 0.0
        out[key] = min(max(a, -clip), clip)
    return out


def node_of(rollouts: Rollouts, row: int, position: int) -> Key | None:
    """The node of a token."""
    way = rollouts.meta["branches"][row]
    if way is None:
        return None
    start = 0
    for number, stop in zip(way["nodes"], way["stops"], strict=True):
        if start <= position < stop:
            return (int(rollouts.group[row]), number)
        start = stop
    return None


def first_copies(rollouts: Rollouts, tokens: Tokens) -> list[bool]:
    """For every token, whether it is trained: the first live copy, in rows with a reward if there are any."""
    seen: dict[Any, list[tuple[Any, int]]] = {}
    out = [False] * len(tokens)
    for i, (row, position) in enumerate(zip(tokens.row.tolist(), tokens.position.tolist(), strict=True)):
        if not tokens.keep[i]:
            continue
        node = node_of(rollouts, row, position)
        if node is None:
            out[i] = True
        else:
            rank = (math.isnan(rollouts.reward[row]), int(rollouts.rollout[row]), int(rollouts.index[row]))
            seen.setdefault((node, position), []).append((rank, i))
    for copies in seen.values():
        out[min(copies)[1]] = True
    return out


def worse_tails(rollouts: Rollouts, tokens: Tokens, advantages: Mapping[Key, float]) -> set[Key]:
    """Nodes that leave with Parent-Top1."""
    nodes, left = nodes_of(rollouts, tokens), set()
    has_tokens = {node_of(rollouts, r, p) for r, p in zip(tokens.row.tolist(), tokens.position.tolist(), strict=True)}

    def rank(key: Key) -> Any:
        rows = nodes[key].leaves
        scored = [row for row in rows if not math.isnan(rollouts.reward[row])]
        score = advantages[key] if scored and key in has_tokens else -math.inf
        return -score, min((math.isnan(rollouts.reward[row]), int(rollouts.rollout[row])) for row in rows)

    for group in {key[0] for key in nodes}:
        tree = {key: node for key, node in nodes.items() if key[0] == group}
        last = max((node.depth for node in tree.values() if len(node.children) > 1), default=-1)
        if last < 0:
            continue
        alone = max(node.depth for node in tree.values()) == last + 1
        for parent in [node for node in tree.values() if node.depth == last and node.children]:
            for head in sorted(parent.children, key=rank)[1:]:
                below = [head]
                while below:
                    key = below.pop()
                    below += nodes[key].children
                    left |= {key} if alone or key != head else set()
    return left


def batch(
    ways: Sequence[Any], rewards: Sequence[float], group: Sequence[int] | None = None, **changes: Any
) -> tuple[Rollouts, Tokens]:
    """Rollouts with these ways, and their tokens.

    Args:
        ways: per row, None for one without a tree.
        group: default all in one.
        changes: of the rollouts.
    """
    lengths = [3 if way is None else way["stops"][-1] for way in ways]
    group = [0] * len(ways) if group is None else list(group)
    rollouts = make_rollouts(list(rewards), group, lengths=lengths, meta={"branches": list(ways)}, **changes)
    tokens = make_tokens(rollouts, advantages=torch.linspace(-1, 1, len(rollouts)))
    # copies of a token have the same log-prob
    places = zip(tokens.row.tolist(), tokens.position.tolist(), strict=True)
    digest = [zlib.crc32(repr((node_of(rollouts, r, p), p)).encode()) for r, p in places]
    old = torch.tensor([-((d % 997) / 300) for d in digest], dtype=torch.float32)
    return rollouts, tokens.replace(old_logprobs=old)
