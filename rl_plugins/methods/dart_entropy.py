"""Steps that DART trains (arXiv 2509.23866): those with high entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Groups, Idle, Method, MethodParams, Rollouts, Shape, Tokens, param


class DartEntropy(Method):
    """Trains only steps whose mean entropy reaches a quantile of their group.

        H_s  = mean entropy of the tokens of step s,  at the start of the batch
        kept = H_s >= the quantile q of H over all steps of the group

    The quantile is an order statistic, the value at place floor(q (n - 1)) of the n sorted ones, so at most the share q
    of the steps leaves, and ties stay. Tokens of other steps leave the update: they are in no loss and in no divisor.

    Symbols: entropies in nats, of the policy at the start of the batch; steps are turns of the agent.

    Special cases: a group with one step keeps it. Steps without a trained token do not count. Tokens outside of any
    turn stay. Steps of rows without a reward (NaN) count like others; their advantage is 0.

    Source: arXiv 2509.23866, section on high-entropy steps. The released trainer has only a variant that is commented
    out and keeps a share of the whole batch.
    """

    name = "dart_entropy"
    fidelity = "paper"
    does = "Trains only the steps of an agent whose entropy is high within their group"
    problems = ("agents",)
    needs = frozenset({"turns", "entropies", "tokens"})
    idle = (Idle({"kept": 1}, "no step was left out: groups have too few steps for the share `quantile`."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        quantile: float = param(0.2, "q, largest share of a group's steps that leaves", ge=0, lt=1)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        assert tokens.turn is not None and tokens.entropies is not None and rollouts.turns is not None  # in `needs`
        count = len(rollouts.turns.row)
        inside = (tokens.turn >= 0) & tokens.keep
        steps = Groups(tokens.turn[inside], count=count)
        entropy = steps.mean(tokens.entropies[inside].double())  # (turns,), NaN without a token
        groups = Groups(rollouts.groups.index[rollouts.turns.row], count=rollouts.groups.count)
        threshold = lower_quantile(entropy, groups, self.params.quantile)
        high = ~(entropy < groups.rows(threshold))
        there = ~torch.isnan(entropy)
        if bool(there.any()):
            self.log("kept", high[there].double().mean())
            self.log("threshold", threshold.nanmean())
            self.log("entropy_kept", entropy[there & high].mean())
        if bool((there & ~high).any()):
            self.log("entropy_left", entropy[there & ~high].mean())
        stays = torch.ones(len(tokens), dtype=torch.bool)
        stays[inside] = high[tokens.turn[inside]]
        return Shape(keep_tokens=stays)


def lower_quantile(x: Tensor, groups: Groups, q: float) -> Tensor:
    """(groups,) value at place floor(q (n - 1)) of the n sorted values of each group; NaN without values."""
    at = torch.floor(q * (groups.n(x) - 1).clamp(min=0) + 1e-9)
    return groups.max(torch.where(groups.place(-x) == groups.rows(at), x, torch.nan))
