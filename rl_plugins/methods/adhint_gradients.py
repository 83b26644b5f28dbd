"""Gradients of ADHint (arXiv 2512.13095) on the tokens of hints."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rl_plugins import Groups, Idle, Method, MethodParams, Rollouts, Shape, Tokens, param
from rl_plugins.methods.adhint.hints import COLUMN, in_hint


class AdhintGradients(Method):
    """Learns the tokens of a hint as far as the policy is as sure of them as of its own, and never pushes them down.

    Reconstruction: that gradients of hint tokens are modulated by the gap of entropies, and masked where the advantage
    is negative, is in the abstract and a note about the paper. The form of g is ours
    (last look 2026-11-26: of v2 only the beginning is stored).

        g_t = exp(-kappa |H_t - mean H of the row's other trained tokens|)      for tokens of a hint, else 1
        A_t <- g_t A_t;   tokens of a hint with A_t < 0 leave the update

    Tokens that leave are in no loss and in no divisor. g is without gradient. Scaling the advantage scales the clipped
    loss, because g is positive.

    Symbols: H entropy in nats, of the policy at the start of the batch, at the place that predicts the token.

    Special cases: a row without other trained tokens has g = 1. Hints that are only read (`hint_loss: false`) are not
    trained, so nothing changes. `kappa: 0` only masks.

    Source: arXiv 2512.13095, abstract; masking as a third party reports it.
    """

    name = "adhint_gradients"
    fidelity = "reconstruction"
    does = "Weighs the tokens of hints by the policy's entropy there, and takes them out of failing rollouts"
    problems = ("too_hard", "no_signal")
    needs = frozenset({"tokens", "entropies", f"column:{COLUMN}"})
    idle = (Idle({"weight": 1, "left": 0}, "no token of a hint was changed."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        kappa: float = param(1.0, "fall of the log of the weight per nat of the gap of entropies; 0: none", ge=0)
        mask_failures: bool = param(True, "removal of hint tokens of rollouts with a negative advantage")

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        assert tokens.entropies is not None  # in `needs`
        hint, entropy = in_hint(rollouts, tokens), tokens.entropies.double()
        rows = Groups(tokens.row, count=len(rollouts))
        own = rows.mean(torch.where(tokens.keep & ~hint, entropy, torch.nan))
        gap = (entropy - own[tokens.row]).abs().nan_to_num(nan=0.0)
        weight = torch.where(hint, torch.exp(-self.params.kappa * gap), 1.0)
        leaves = hint & (tokens.advantages < 0) & self.params.mask_failures
        trained = hint & tokens.keep
        if bool(trained.any()):
            self.log("weight", weight[trained].mean())
            self.log("gap", gap[trained].mean())
            self.log("left", leaves[trained].double().mean())
        return Shape(advantages=weight * tokens.advantages, keep_tokens=~leaves)
