"""HGPO (arXiv 2602.22817): compares turns in nested groups, by state and by the states before it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Groups, Idle, Method, MethodParams, Rollouts, param
from rl_plugins.core.params import above
from rl_plugins.kit.agents.turns import Turns, joint, normalized, state_ids

_ZERO = 1e-6  # relative difference from the mean that is rounding
_DEEP, _BASE = {"history_length": above(0)}, {"base_group": True}
_WEIGHED = ({"length_weight_alpha": above(0), **_DEEP}, {"length_weight_alpha": above(0), **_BASE})
_ALPHA = (_DEEP, {**_BASE, "weight_offset": above(1)})
Mode = Literal["mean_norm", "mean_std_norm"]


class Hgpo(Method):
    """Compares a turn with turns of its group that share its state, its last two states, and so on.

    For turn t of a rollout with observations o, rewards r and depths k = 0 .. min(K, t), K = `history_length`:

        g_t = r_t + gamma g_(t+1)                                   discounted return
        G_k = turns of the group with the same o_(t-k) .. o_t       G_0 holds G_1 holds ..
        A_k = (g_t - mean_k(g)) / (std_k(g) + eps)                  over G_k, divisor n; `mode: mean_norm`: no division
        A_t = sum_k w_k A_k / (sum_k w_k + eps),   w_k = (k + weight_offset)^length_weight_alpha

    The sums run over depths whose group has another turn and whose A_k is not 0 (`drop_zero`). `base_group` adds one
    more entry of weight 1: the comparison of rewards over all turns of the group (GiGPO's A^E, divisor n - 1).

    Symbols: everything is (turns,) float64 over `rollouts.turns`. Observations are equal by value (texts, numbers,
    arrays, nested lists and mappings); None equals no other.

    Special cases: turns of rows without a reward (NaN) count in no statistic and have A = 0. A turn without another one
    to compare with at any depth has A = 0. `invalid_action_penalty_coef` is subtracted from reward and return, after
    returns, if an action was not understood. Without rewards of turns the rollout's is that of its last turn.

    Raises:
        MethodError: an observation that cannot be compared.

    Source: arXiv 2602.22817, Eq. 3 to 7; `recipe/hgpo/core_hgpo.py` of the authors' code.
    """

    name = "hgpo"
    fidelity = "code"
    does = "Compares turns with the same state and the same recent states, averaged over history lengths"
    problems = ("agents",)
    needs = frozenset({"turns"})
    advantages_per = "turn"
    idle = (Idle({"compared_0": 0}, "no two turns of a group share a state. Look at the environment's states."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        history_length: int = param(2, "K, earlier states that are compared: as many as the prompt holds turns", ge=0)
        gamma: float = param(0.95, "discount of later rewards, per turn", ge=0, le=1)
        mode: Mode = param("mean_std_norm", "differences from the mean, or also divided by std + eps")
        length_weight_alpha: float = param(1.0, "exponent alpha of w_k", ge=0, only_if=_ALPHA)
        weight_offset: int = param(1, "offset of k in w_k: 1 (paper) or 2 (code)", ge=1, only_if=_WEIGHED)
        drop_zero: bool = param(True, "A_k of exactly 0 leave the mean", only_if=(_DEEP, _BASE))
        base_group: bool = param(False, "comparison with all turns of the group as an entry of weight 1")
        single_group: Literal["zero", "reward"] = param("zero", "entry of a lone turn: 0 or its reward", only_if=_BASE)
        invalid_action_penalty_coef: float = param(0.1, "penalty of a turn whose action was not understood", ge=0)
        eps: float = param(1e-6, "constant added to the standard deviation and to the sum of weights", gt=0)

    def advantages(self, rollouts: Rollouts) -> Tensor:
        p, turns = self.params, Turns(rollouts)
        penalty = p.invalid_action_penalty_coef * (~turns.table.valid).double()
        returns, reward = turns.returns(p.gamma) - penalty, turns.outcome - penalty
        total, weights = torch.zeros_like(returns), torch.zeros_like(returns)
        if p.base_group:
            entry, counts = self._base_entry(reward, Groups(turns.group))
            total, weights = torch.where(counts, entry, 0.0), counts.double()
        states, history = state_ids(turns.table.anchor), turns.group
        for k in range(p.history_length + 1):
            inside = turns.before >= k
            if not bool(inside.any()):
                break
            # the same history at depth k - 1, and the same state k turns ago; turns without one are apart
            history = joint(history, turns.earlier(states, k))
            groups = Groups(history)
            members = groups.rows(groups.n(returns))
            entry = self._entry(returns, groups, ddof=0)
            counts = inside & (members > 1) & ((entry != 0) | (not p.drop_zero))
            if self.traced:
                name = f"history of {k}" if k else "state"
                self.note_turns(name, torch.where(inside, groups.index, -1), members, entry)
            weight = (k + p.weight_offset) ** p.length_weight_alpha * counts.double()
            total += torch.where(counts, entry * weight, 0.0)
            weights += weight
            scored = ~torch.isnan(returns)
            if bool(scored.any()):
                self.log(f"compared_{k}", (inside & (members > 1))[scored].double().mean())
        advantages = (total / (weights + p.eps)).masked_fill(torch.isnan(returns), 0.0)
        if len(advantages):
            self.log("abs", advantages.abs().mean())
        return advantages

    def _entry(self, x: Tensor, groups: Groups, ddof: int) -> Tensor:
        """(turns,) normalized difference from the mean, exactly 0 where it is rounding."""
        p = self.params
        near = (x - groups.rows(groups.mean(x))).abs() <= _ZERO * x.abs().clamp(min=1)
        return normalized(x, groups, p.mode == "mean_std_norm", p.eps, ddof).masked_fill(near, 0.0)

    def _base_entry(self, reward: Tensor, groups: Groups) -> tuple[Tensor, Tensor]:
        """The comparison of rewards in the whole group, and where it counts."""
        p = self.params
        entry = self._entry(reward, groups, ddof=1)
        alone = groups.rows(groups.n(reward) == 1)
        if p.single_group == "reward":
            entry = torch.where(alone, reward / (1 + p.eps) if p.mode == "mean_std_norm" else reward, entry)
            alone = torch.zeros_like(alone)
        return entry, ~torch.isnan(reward) & ~alone & ((entry != 0) | (not p.drop_zero))
