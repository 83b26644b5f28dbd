"""Pruning of BranchGRPO (arXiv 2509.06040): which nodes of a tree are trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from rl_plugins import ConfigError, Groups, Idle, Method, MethodParams, Rollouts, Run, Shape, Tokens, param
from rl_plugins.core.params import GIVEN
from rl_plugins.methods.branch_grpo.trees import COLUMN, Trees

_RANKED = ({"width": "extreme"}, {"width": "parent_top1", "code_compat": True})


class BranchPruning(Method):
    """Leaves nodes of a tree of rollouts out of the update, in batches i = 1 .. floor(until * batches of the run).

        depth   nodes whose depth is in {d - shift : d in depths} leave
                shift = min(floor(i / interval), max(0, min(depths) - stop))         0 without `interval`
        width   some nodes of the tails leave, those after the last split; `depths` come first:
                parent_top1   of the children of one node at the last split, the best one keeps its tail
                extreme       of N tail nodes min(N, max(2, floor(ratio N))) stay: half of them the best, half the worst

    stop is `stop_depth`, or the largest depth of a node with several children in the batch. The tail of a child of the
    last split is all below it, or the child itself where no node is below these children (completions). With
    `code_compat: true` parent_top1 is the code's form: each tail keeps its max(1, floor(ratio n)) best nodes.

    Symbols: nodes are ranked by the mean advantage of their tokens, so list `branch_advantages` first. A child without
    tokens or without a reward (NaN) ranks last. Of equal ones the first stays. Rows that note no tree stay.

    Raises:
        ConfigError, MethodError: `depths` is empty and `width` is "none"; trees as `branch_advantages` refuses them.

    Source: arXiv 2509.06040; `train_one_step_tree` in `fastvideo/train_branchgrpo_flux.py` of the authors' code.
    """

    name = "branch_pruning"
    fidelity = "paper"
    does = "Leaves parts of a tree of rollouts out of the update, by depth or by width"
    problems = ("few_rollouts",)
    hosts = ("trl", "verl", "diffusion")
    idle = (Idle({"pruned": 0}, "nothing was pruned. Look at `depths`, `until` and `width`."),)
    needs = frozenset({"tokens", f"column:{COLUMN}"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        depths: tuple[int, ...] = param((), "depths whose nodes leave, at the start of the run", ge=0)
        interval: int | None = param(None, "number of batches after which these depths move one up; none: never", ge=1)
        stop_depth: int | None = param(
            None, "depth that ends the moving; none: that of the last split", ge=0, only_if={"interval": GIVEN}
        )
        width: Literal["parent_top1", "extreme", "none"] = param("parent_top1", "choice among the tails of a tree")
        ratio: float = param(0.5, "share of the nodes that stay", gt=0, le=1, only_if=_RANKED)
        code_compat: bool = param(False, "form of parent_top1 in the authors' code", only_if={"width": "parent_top1"})
        until: float = param(1.0, "share of the run in which pruning acts", ge=0, le=1)

        def check(self) -> None:
            if not self.depths and self.width == "none":
                raise ConfigError(
                    "`depths` is empty and `width` is 'none', so no node would leave. Give depths, or set `width`."
                )
            if not self.depths and self.interval is not None:
                raise ConfigError(
                    f"`interval` is {self.interval}, and there are no `depths` to move. Give depths, or remove it."
                )

    def start(self, run: Run) -> None:
        self._last = int(np.floor(self.params.until * run.total_batches))

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        step = rollouts.batch + 1
        trees = Trees.of(rollouts, tokens) if step <= self._last else None
        if trees is None:
            return None
        of_tree = trees.token_node >= 0
        trained = torch.bincount(trees.token_node[of_tree & tokens.keep], minlength=trees.count) > 0
        leaves = self._by_depth(trees, step)
        scores = node_scores(trees, rollouts, tokens)
        if self.params.width != "none":
            tails = Tails.of(trees, scores)
            leaves = leaves | self._by_width(tails, trained & ~leaves)
        pruned, total = int((leaves & trained).sum()), int(trained.sum())
        if self.traced:
            for node in (leaves & trained).nonzero()[:, 0].tolist():
                where = {"node": node, "depth": int(trees.depth[node]), "score": float(scores[node])}
                text = "node {node} of depth {depth} is pruned with the score {score:.2f}"
                self.note(trees.row[trees.node == node], text, **where)
        self.log("nodes", total / len(torch.unique(trees.tree)))
        self.log("pruned", pruned / total if total else 0.0)
        return Shape(keep_tokens=~(of_tree & leaves[trees.token_node]))

    def _by_depth(self, trees: Trees, step: int) -> Tensor:
        p = self.params
        if not p.depths:
            return torch.zeros(trees.count, dtype=torch.bool)
        stop = int(trees.last_split.max()) if p.stop_depth is None else p.stop_depth
        shift = 0 if p.interval is None else min(step // p.interval, max(0, min(p.depths) - max(stop, 0)))
        self.log("shift", shift)
        return torch.isin(trees.depth, torch.tensor(p.depths) - shift)

    def _by_width(self, tails: Tails, trained: Tensor) -> Tensor:
        p = self.params
        if p.width == "extreme":
            return tails.node & trained & ~tails.extremes(trained, p.ratio)
        if p.code_compat:
            return tails.node & trained & ~tails.best_of_each(trained, p.ratio)
        return tails.node & ~tails.of_best_child()


@dataclass(frozen=True)
class Tails:
    """The nodes after the last split of every tree.

    Attributes:
        trees: all of them.
        score: (nodes,) what they are ranked by.
        node: (nodes,) bool, the node is of a tail.
        head: (nodes,) int64 the child of the last split that a node lies below, or is; -1 for others.
    """

    trees: Trees
    score: Tensor
    node: Tensor
    head: Tensor

    @classmethod
    def of(cls, trees: Trees, score: Tensor) -> Tails:
        last = trees.last_split[trees.tree]
        deepest = Groups(trees.tree).rows(Groups(trees.tree).max(trees.depth.double())).long()
        behind = (last >= 0) & (trees.depth > last)
        inner = trees.depth > last + 1
        rows = Groups(trees.row)
        begin = rows.rows(torch.cumsum(rows.size, 0) - rows.size)
        below = behind[trees.node]
        head = torch.full((trees.count,), -1)
        head[trees.node[below]] = trees.node[(begin + last[trees.node] + 1)[below]]
        return cls(trees, score, behind & (inner | (deepest == last + 1)), head)

    def of_best_child(self) -> Tensor:
        """(nodes,) bool, on the way of the best child of its parent."""
        heads = (self.head == torch.arange(len(self.head))).nonzero()[:, 0]
        parents = Groups(self.trees.parent[heads])
        best = torch.zeros(self.trees.count, dtype=torch.bool)
        best[heads] = parents.top_k(self.score[heads], 1)
        return best[self.head.clamp(min=0)] & (self.head >= 0)

    def best_of_each(self, trained: Tensor, ratio: float) -> Tensor:
        """(nodes,) bool, among the best trained nodes of its tail."""
        place, size = self._ranked(self.head, trained)
        return place < torch.clamp((size * ratio).floor(), min=1)

    def extremes(self, trained: Tensor, ratio: float) -> Tensor:
        """(nodes,) bool, among the best or the worst trained tail nodes of its tree."""
        place, size = self._ranked(self.trees.tree, trained)
        stay = torch.minimum(size, torch.clamp((size * ratio).floor(), min=2))
        best = (stay / 2).floor()
        return (place < best) | (place >= size - (stay - best))

    def _ranked(self, group: Tensor, trained: Tensor) -> tuple[Tensor, Tensor]:
        """(nodes,) place of a trained tail node in its group, the best one first, and how many such nodes it has."""
        groups, score = Groups(group), torch.where(self.node & trained, self.score, torch.nan)
        return groups.place(score), groups.rows(groups.n(score))


def node_scores(trees: Trees, rollouts: Rollouts, tokens: Tokens) -> Tensor:
    """(nodes,) mean advantage of each node's tokens, -inf where it has no token or no leaf with a reward."""
    of_tree = trees.token_node >= 0
    mean = Groups(trees.token_node[of_tree], count=trees.count).mean(tokens.advantages[of_tree])
    scored = trees.nodes.n(rollouts.reward[trees.row]) > 0
    return torch.where(scored & ~torch.isnan(mean), mean, -torch.inf)
