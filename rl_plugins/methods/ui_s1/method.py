"""UI-S1 (arXiv 2509.11543): recorded expert trajectories as an environment, and returns that reach over later turns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Groups, Method, MethodError, Rollouts, from_params
from rl_plugins.kit.agents.turns import joint, normalized
from rl_plugins.methods.ui_s1.params import UiS1Params


class UiS1(Method):
    """Semi-online RL: trains multi-turn rollouts on recorded trajectories, with discounted future returns.

    A task is a recorded expert trajectory, a group its rollouts. Turn k of a rollout (a step in the paper) has the
    reward r_k and the match m_k (the policy's action is the expert's). While actions match, the next recorded
    observation is served; a wrong action is replaced by the expert's in the history, at most `max_patches` times, and
    the rollout continues (`SemiOnlineEpisode`, `ui_s1_rollout`). The replacement is never trained. Then

        R_k = r_k + gamma R_{k+1}   if m_k and m_{k+1}    (`include_first_mismatch`: if m_k)
        R_k = r_k                   otherwise

        A_step = (R_k - mean(R)) / (std(R) + std_eps)     over the rollouts of the task that reached the same turn
        A_epi  = (r_k - mean(r)) / (std(r) + std_eps)     over all turns of the task; std with divisor n - 1
        A_k    = episode_weight A_epi + step_weight A_step

    Before that a task leaves if the standard deviation (divisor n) of R_0 over its rollouts, two or more, is not above
    `filter_std`. The loss is the host's.

    Symbols: rewards, returns and advantages are (turns,) float64. In the signal "turns" `turn` is k, `reward` r_k and
    `valid` m_k. Every turn is a separate row (prompt with the patched history, response); without patches a rollout may
    also be one row. The reward of a row only tells whether it was scored (not NaN): values of reward functions and
    `rewards` hooks are not used.

    Special cases: a turn without a reward (NaN, or its row's reward is NaN) counts in no statistic, has A = 0, and ends
    the return of the turn before it; so does a turn whose row left. A turn that only one rollout reached has A_step =
    0; a task of one turn has A = 0 and a warning.

    Raises:
        ConfigError: a parameter out of range.
        MethodError: a batch without turns; an episode that is used wrongly.

    Source: arXiv 2509.11543, equations 5 to 13; in the authors' code, commit 11cea575: `UI-S1/uis1/core_uis1.py`,
    `verl/utils/dataset/universal_multiround.py`, `verl/trainer/ppo/dapo_ray_trainer.py`,
    `verl/utils/reward_score/gui_traj.py`.
    """

    name = "ui_s1"
    fidelity = "code"
    does = "Trains on recorded expert trajectories with returns that reach over later turns"
    problems = ("agents",)
    needs = frozenset({"turns"})
    advantages_per = "turn"
    rows_per_rollout = from_params(lambda p: p.rows_per_rollout)
    Params = UiS1Params

    def select(self, rollouts: Rollouts) -> Tensor:
        """Tasks whose rollouts differ too little leave."""
        p, s = self.params, self._read(rollouts)
        first = torch.where(s.turn == 0, s.returns, torch.nan)
        value = self._credit(s) if p.filter_by == "advantages" else first
        leaves = (s.tasks.n(first) > 1) & (s.tasks.std(value, ddof=0) <= p.filter_std) & (p.filter_by != "none")
        self._report(s, first, leaves)
        if self.traced:
            spread = dict(zip(s.tasks.ids.tolist(), s.tasks.std(value, ddof=0).tolist(), strict=True))
            gone = torch.isin(rollouts.group, s.tasks.ids[leaves]).nonzero()[:, 0].tolist()
            std = [spread[g] for g in rollouts.group[gone].tolist()]
            self.note(
                gone, "rollouts of the task differ by {std:.2g}; more than {least:g} stays", std=std, least=p.filter_std
            )
        return ~torch.isin(rollouts.group, s.tasks.ids[leaves])

    def advantages(self, rollouts: Rollouts) -> Tensor:
        return torch.nan_to_num(self._credit(self._read(rollouts)), nan=0.0)

    def _read(self, rollouts: Rollouts) -> _Turns:
        table, p = rollouts.turns, self.params
        if table is None:
            raise MethodError(
                "the batch has no turns (rollouts.turns is None). `ui_s1` needs the number, the reward and the match "
                "of every turn; let the agent loop, environment or rollout function of the run report them."
            )
        unusable = (torch.isnan(rollouts.reward) | ~rollouts.kept)[table.row]
        reward = torch.where(unusable, torch.nan, table.reward)
        tasks = Groups(rollouts.group[table.row])
        rollout = joint(tasks.index, rollouts.rollout[table.row])
        returns = turn_returns(reward, table.valid, rollout, table.turn, p.gamma, p.include_first_mismatch)
        same_turn = Groups(joint(tasks.index, table.turn))
        return _Turns(reward, returns, table.valid, table.turn, tasks, Groups(rollout), same_turn)

    def _credit(self, s: _Turns) -> Tensor:
        """(turns,) advantages; NaN where a turn has no reward."""
        p = self.params
        by_std, eps = p.scale == "std", p.std_eps
        if p.episode_source == "step_reward":
            episode = normalized(s.reward, s.tasks, by_std, eps)
        else:
            scored = torch.where(torch.isnan(s.returns), torch.nan, s.turn.double())
            first = scored == s.rollouts.rows(s.rollouts.min(scored))
            of_rollout = torch.where(first, s.returns, torch.nan)  # one value per rollout
            episode = normalized(s.rollouts.rows(s.rollouts.max(of_rollout)), s.tasks, by_std, eps, of=of_rollout)
        by_turn = normalized(s.returns, s.same_turn, by_std, eps)
        if bool((s.tasks.n(s.reward) == 1).any()):
            self.warn("a task has a single turn with a reward; there is nothing to compare it with, so A = 0.")
        return torch.where(torch.isnan(s.reward), torch.nan, p.episode_weight * episode + p.step_weight * by_turn)

    def _report(self, s: _Turns, first: Tensor, leaves: Tensor) -> None:
        rollouts = s.rollouts.count
        went_on = s.turn < s.rollouts.rows(s.rollouts.max(s.turn.double()))
        reached_by = s.same_turn.rows(s.same_turn.n(s.returns))
        self.log("matched", s.matched.double().mean(), weight=len(s.turn))
        self.log("patches", (~s.matched & went_on).sum() / max(rollouts, 1), weight=rollouts)
        self.log("steps", len(s.turn) / max(rollouts, 1), weight=rollouts)
        self.log("first_return", first.nanmean())
        self.log("alone", (reached_by == 1).double().mean())
        self.log("filtered", leaves.double().mean())
        if len(leaves) and bool(leaves.all()):
            self.warn(
                "no task of a batch stays: the first returns of its rollouts differ too little "
                "(`filter_std`). If this is frequent, the tasks are too easy or too hard; lower "
                "`filter_std` or set `filter_by: none`."
            )


@dataclass(frozen=True)
class _Turns:
    """All (turns,), NaN reward and return where a turn has no reward; and the groups they are compared in."""

    reward: Tensor
    returns: Tensor
    matched: Tensor
    turn: Tensor
    tasks: Groups
    rollouts: Groups
    same_turn: Groups


def turn_returns(
    reward: Tensor, matched: Tensor, rollout: Tensor, turn: Tensor, gamma: float, include_first_mismatch: bool = False
) -> Tensor:
    """Discounted return of every turn over the matching turns that follow it without a gap.

    Args:
        reward: (turns,) float64, NaN where there is none.
        matched: (turns,) bool.
        rollout, turn: (turns,) int64, whose turn and which; in any order.
        gamma: discount.
        include_first_mismatch: the first turn that does not match counts in the returns before it.
    """
    order = torch.sort(turn, stable=True).indices
    order = order[torch.sort(rollout[order], stable=True).indices]
    r, m, who, when = reward[order], matched[order], rollout[order], turn[order]
    follows = (who[1:] == who[:-1]) & (when[1:] == when[:-1] + 1) & ~torch.isnan(r[1:] + r[:-1])
    begins = torch.ones(len(r), dtype=torch.bool)
    begins[1:] = ~(follows & m[:-1] & (m[1:] | include_first_mismatch))
    stretch = torch.cumsum(begins, 0) - 1
    length = torch.bincount(stretch)
    to_end = (torch.cumsum(length, 0) - 1)[stretch] - torch.arange(len(r))
    longest = int(length.max()) if len(length) else 0
    table = torch.zeros(len(length), longest, dtype=torch.float64)
    table[stretch, to_end] = r.double()
    for back in range(1, longest):  # over turns, all rollouts at once, in the order of the authors' recursion
        table[:, back] += gamma * table[:, back - 1]
    returns = torch.empty(len(r), dtype=torch.float64)
    returns[order] = table[stretch, to_end]
    return returns
