"""Advantages of ADHint (arXiv 2512.13095): hinted rollouts had an easier task."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Method, Rollouts, param
from rl_plugins.kit.prompt_memory import SuccessParams
from rl_plugins.methods.adhint.hints import COLUMN, hinted


class AdhintAdvantages(Method):
    """GRPO over naive and hinted rollouts of a prompt, scaled by how much easier the hints made it.

    Reconstruction: that successes without a hint are worth more, and failures with one cost more, is from a note about
    the paper. Its formula could not be read (last look 2026-11-26: of v2 only the beginning is stored); the
    one here is ours.

        A_i = (R_i - mean) / (std + eps),                         over all rollouts of the group
        c   = clip((1 + D_naive) / (1 + D_hinted), 1 / c_max, c_max)
        A_i <- c A_i     for naive rollouts with A_i > 0 and hinted ones with A_i < 0
        A_i <- A_i / c   for the others

    D is 1 - share of successes among the naive or the hinted rollouts of the group that have a reward.

    Symbols: R_i reward, float64; std with divisor n - 1; a success is a reward of at least `success_threshold`.

    Special cases: with D_naive = D_hinted, or without rollouts of one kind, c = 1 and this is GRPO. The sign of an
    advantage never changes. Rollouts without a reward (NaN) are out of all statistics and have the advantage 0. A
    rollout of several rows counts once. Groups of one, or of equal rewards, have the advantage 0.

    Source: arXiv 2512.13095, abstract; the meaning as a third party reports it.
    """

    name = "adhint_advantages"
    fidelity = "reconstruction"
    does = "Compares rollouts with and without hints, and allows for the easier task of the former"
    problems = ("too_hard", "no_signal")
    needs = frozenset({f"column:{COLUMN}"})

    @dataclass(frozen=True)
    class Params(SuccessParams):
        c_max: float = param(2.0, "largest factor; 1: plain GRPO", ge=1)
        eps: float = param(1e-6, "constant added to the standard deviation", gt=0)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        once = rollouts.per_rollout
        groups, reward = once.groups, once.reward
        centered, std = groups.center_and_std(reward)
        a = (centered / groups.rows(std + self.params.eps)).nan_to_num(nan=0.0)
        success = self.params.successes(reward)
        with_hint = hinted(rollouts)[once.last]
        naive_d, hinted_d = (1 - groups.mean(torch.where(kind, success, torch.nan)) for kind in (~with_hint, with_hint))
        bound = self.params.c_max
        factor = ((1 + naive_d) / (1 + hinted_d)).clamp(1 / bound, bound)
        both = ~torch.isnan(factor)
        if bool(both.any()):
            self.log("factor", factor[both].mean())
            self.log("difficulty_naive", naive_d[both].mean())
            self.log("difficulty_hinted", hinted_d[both].mean())
        c = groups.rows(factor.nan_to_num(nan=1.0))
        scaled = torch.where((a > 0) ^ with_hint, c * a, a / c)
        return once.rows.rows(torch.where(a == 0, 0.0, scaled))
