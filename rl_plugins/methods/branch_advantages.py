"""Advantages of BranchGRPO (arXiv 2509.06040): a value for every node of a tree, compared at equal depth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Groups, Idle, Method, MethodParams, Rollouts, Shape, Tokens, from_params, param, signals
from rl_plugins.core.groups import joint
from rl_plugins.methods.branch_grpo.trees import COLUMN, Trees

_WEIGHTED = {"fusion": ("paths", "levels")}


class BranchAdvantages(Method):
    """Gives every token the advantage of its node in the tree of rollouts, and trains shared tokens once.

    A node n is a transition of a sample, or a segment of a completion. Its leaves are the rows whose way leads through
    it, r_l their rewards, s_nl the sum of the log-probs l_c of the nodes on the way from n down to leaf l.

        V(n) = sum over leaves l below n of w_l r_l

        uniform   w_l = 1 / number of leaves
        paths     w = softmax over leaves of beta s_nl                                        the paper's form
        levels    V(n) = sum over children c of softmax_c(beta l_c) V(c), from the leaves up      the code's form

        A(n) = (V(n) - mean) / (std + eps)      over the nodes of n's depth in its tree; 0 if std < 1e-6
        A_t  = clip(A(n), -clip, clip)          for every token t of n, instead of any estimator's advantage

    Of the copies of a token that several rows share one is trained (`shared: first`), that of the lowest rollout among
    those that no other method took out: right for averages over tokens. `shared: every`, for averages over rows, trains
    all copies with the advantage divided by their number.

    Symbols: r, V and A are float64, std has the divisor n - 1. l_c is the mean or the sum (`edge_logprob`) of the old
    log-probs of c's tokens, 0 without one. `rollouts.meta["branches"]` names a row's nodes (`branch_grpo.trees`).

    Special cases: a row without a reward (NaN) is no leaf, and its copy of a token stays only if it is the only one. A
    node without any leaf, and a depth with one node, have the advantage 0; the former is in no mean. Two rows with the
    same last node are two leaves. A row that notes no tree keeps its advantages.

    Raises:
        MethodError: a row's note cannot be read, or the rows of a tree do not fit together.

    Source: arXiv 2509.06040; `fastvideo/train_branchgrpo_flux.py` of the authors' code.
    """

    name = "branch_advantages"
    fidelity = "code"
    does = "Compares the nodes of a tree of rollouts at equal depth, and trains what rollouts share once"
    problems = ("few_rollouts",)
    hosts = ("trl", "verl", "diffusion")
    needs = from_params(lambda p: signals("tokens", columns=[COLUMN], old_logprobs=p.fusion != "uniform"))
    idle = (Idle({"in_trees": 0}, "no row has a tree. Add `branch_text_rollout` or `branch_rollout`."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        fusion: Literal["uniform", "paths", "levels"] = param("uniform", "weights of leaves: equal, by path, by level")
        beta: float = param(
            1.0, "beta, factor of the log-probs in the weights; 0: equal weights", ge=0, only_if=_WEIGHTED
        )
        edge_logprob: Literal["mean", "sum"] = param("mean", "log-prob of a node of several tokens", only_if=_WEIGHTED)
        clip: float = param(5.0, "largest |A|", gt=0, allow_inf=True)
        eps: float = param(1e-8, "constant added to the standard deviation", gt=0)
        shared: Literal["first", "every"] = param("first", "copies of a shared token that are trained")

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape | None:
        trees = Trees.of(rollouts, tokens)
        self.log("in_trees", 0.0 if trees is None else len(torch.unique(trees.row)) / len(rollouts))
        if trees is None:
            return None
        value = self._values(trees, rollouts.reward.double(), tokens)
        advantage = depth_advantages(trees, value, self.params.eps)
        self.log("compared", (advantage != 0).double().mean())
        self.log("clipped", (advantage.abs() > self.params.clip).double().mean())
        advantage = advantage.clamp(-self.params.clip, self.params.clip)
        first, copies = trees.copies(tokens.keep, tokens)
        of_tree = trees.token_node >= 0
        new = torch.where(of_tree, advantage[trees.token_node], tokens.advantages)
        trained = int(tokens.keep.sum())
        self.log("shared", 1 - int(first.sum()) / trained if trained else 0.0)
        if self.params.shared == "every":
            return Shape(advantages=new / copies.clamp(min=1))
        return Shape(advantages=new, keep_tokens=first)

    def _values(self, trees: Trees, reward: Tensor, tokens: Tokens) -> Tensor:
        """(nodes,) V, NaN where no leaf has a reward."""
        p = self.params
        if p.fusion == "uniform":
            return trees.nodes.mean(reward[trees.row])
        logprob = self._edges(trees, tokens)
        if p.fusion == "levels":
            return level_values(trees, reward, p.beta * logprob)
        return path_values(trees, reward, p.beta * logprob)

    def _edges(self, trees: Trees, tokens: Tokens) -> Tensor:
        """(nodes,) log-prob of each node, from the first copy of its tokens."""
        assert tokens.old_logprobs is not None  # in `needs`
        first, _ = trees.copies(trees.token_node >= 0, tokens)
        by_node = Groups(trees.token_node[first], count=trees.count)
        logprob = tokens.old_logprobs.double()[first]
        return by_node.sum(logprob) if self.params.edge_logprob == "sum" else by_node.mean(logprob).nan_to_num(nan=0.0)


def path_values(trees: Trees, reward: Tensor, logprob: Tensor) -> Tensor:
    """(nodes,) mean reward of the leaves below each node, weighted by softmax of the log-prob of the way down to them.

    Args:
        reward: (rows,) NaN: no leaf.
        logprob: (nodes,) of each node, times beta.
    """
    rows, nodes = Groups(trees.row), trees.nodes
    total = torch.cumsum(logprob[trees.node], 0)
    last = rows.max(torch.arange(len(total)).double()).long()  # entry of each row
    below = torch.where(torch.isnan(reward)[trees.row], torch.nan, rows.rows(total[last]) - total)
    weight = torch.exp(below - nodes.rows(nodes.max(below)))
    known = weight.nan_to_num(nan=0.0)
    return nodes.sum(known * reward[trees.row].nan_to_num(nan=0.0)) / nodes.sum(known)


def level_values(trees: Trees, reward: Tensor, logprob: Tensor) -> Tensor:
    """(nodes,) mean of the children's values, weighted by softmax of their log-probs, from the leaves up.

    Args:
        reward, logprob: as in `path_values`.
    """
    value = torch.where(trees.children > 0, torch.nan, trees.nodes.mean(reward[trees.row]))
    for depth in range(int(trees.depth.max()), 0, -1):  # a few levels, each at once
        here = ((trees.depth == depth) & ~torch.isnan(value)).nonzero()[:, 0]
        siblings = Groups(trees.parent[here], count=trees.count)
        weight = torch.exp(logprob[here] - siblings.rows(siblings.max(logprob[here])))
        mean = siblings.sum(weight * value[here]) / siblings.sum(weight)
        value = torch.where(siblings.size > 0, mean, value)
    return value


def depth_advantages(trees: Trees, value: Tensor, eps: float) -> Tensor:
    """(nodes,) values compared with those of the same tree and depth; 0 where there is nothing to compare."""
    peers = Groups(joint(trees.tree, trees.depth))
    centered, std = peers.center_and_std(value)
    spread = peers.rows(std)
    return torch.where(spread < 1e-6, 0.0, centered / (spread + eps)).nan_to_num(nan=0.0)
