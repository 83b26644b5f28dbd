"""PKPO (arXiv 2505.15201): advantages that optimize the best of k rollouts, without bias for any group size."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Rollouts, param


class Pkpo(Method):
    """Pass@k policy optimization: credits a rollout with what it adds to the best of the subsets that contain it.

    Of the n rewards of a prompt in ascending order, g_1 to g_n, over all subsets I of k of them that contain i:

        s_i = 1 / C(n, k)  sum_I (max of I - max of I without i)
        A_i = n s_i

    so the mean of A_i grad log p_i over the group is an unbiased gradient of the expected maximum of k rollouts, which
    is pass@k for rewards of 0 and 1. With the gaps between neighbours in ascending order the sum has one term each:

        s_i = sum_{l < i} (g_{l+1} - g_l) C(l, k - 1) / C(n, k)

    It costs a sort. With k = n only the best rollout has an advantage: n times its lead over the second.

    Symbols: g, A (rows,) float64.

    Special cases: a prompt with n < k rewards uses k = n. A group with a single reward has A = 0, and equal rewards
    give 0. NaN rewards are left out and have A = 0. A rollout of several rows counts once, with the mean of their
    rewards.

    Source: arXiv 2505.15201, equation 33 (s^(loo-1)) and listing 1.
    """

    name = "pkpo"
    fidelity = "code"
    does = "Optimizes pass@k: credits a rollout with what it adds to the best of k"
    problems = ("exploration",)
    needs = frozenset({"several_rollouts"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        k: int = param(4, "k, number of rollouts whose best one counts", ge=2)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        each = rollouts.per_rollout
        groups, reward = each.groups, each.reward
        n = groups.n(reward)
        place = groups.place(-reward)  # 0 for the smallest, NaN last
        ascending = torch.full((groups.count, int(n.max()) if len(n) else 0), torch.nan, dtype=torch.float64)
        scored = ~torch.isnan(reward)
        ascending[groups.index[scored], place[scored]] = reward[scored]
        gap = ascending.diff(dim=1, prepend=ascending[:, :1]).nan_to_num(nan=0.0)
        k, below = torch.minimum(n, torch.tensor(float(self.params.k)))[:, None], torch.arange(gap.shape[1]).double()
        weight = torch.exp(_log_choose(below, k - 1) - _log_choose(n[:, None], k))
        credit = n[:, None] * torch.cumsum(gap * weight, dim=1)
        self.log("best_of_k", (ascending.nan_to_num(nan=0.0) * weight).sum(1)[n > 0].mean())
        advantages = torch.zeros_like(reward)
        advantages[scored] = credit[groups.index[scored], place[scored]]
        return each.rows.rows(advantages)


def _log_choose(n: Tensor, k: Tensor) -> Tensor:
    """log C(n, k), -inf where n < k."""
    value = torch.lgamma(n + 1) - torch.lgamma(k + 1) - torch.lgamma((n - k).clamp(min=0) + 1)
    return torch.where(n < k, -torch.inf, value)
