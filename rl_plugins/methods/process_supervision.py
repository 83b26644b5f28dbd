"""GRPO with process supervision (DeepSeekMath, arXiv 2402.03300): rewards per step instead of one at the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rl_plugins import Groups, Idle, Method, MethodParams, Rollouts, Run, Shape, Tokens, from_params, param, signals
from rl_plugins.core.groups import places, spread
from rl_plugins.core.rollouts import Jagged, weighted_reward
from rl_plugins.kit.steps import separated


class ProcessSupervision(Method):
    """Credits a token with the rewards of its own step and of those that follow, normalized over the group's steps.

    With r_ij the reward of step j of rollout i, and R all of them in its group:

        z_ij = (r_ij - mean R) / (std R + eps)
        A_it = sum of z_ij over the steps j from the one of token t on

    A reward function returns a list of these numbers in the place of one number. `steps` says what a step is:

        text     what `text.split(separator)` gives; a token belongs to the step in which it begins
        turn     a turn of an agent
        token    a token of the completion, those that were only read counted

    Symbols: r, z, A float64; std with divisor n - 1.

    Special cases: tokens behind the last reward belong to its step, so a number in the place of a list is a single
    step and supervises the outcome. Rewards of steps without a token count for the tokens before them. A step without a
    reward (None, NaN) is left out of R and has z = 0; a group with one reward, or equal ones, has A = 0. What `rewards`
    hooks add to the reward of a rollout counts for its last step, and a rollout without a reward has A = 0. Of several
    rows of a rollout (turns) the last one brings the list.

    Source: arXiv 2402.03300, section 4.1.3.
    """

    name = "process_supervision"
    fidelity = "paper"
    does = "Credits tokens with the rewards of their own and later steps, normalized over the group"
    problems = ("weak_reward", "agents")
    needs = from_params(
        lambda p: signals("step_rewards", "tokens", turns=p.steps == "turn", token_ids=p.steps == "text")
    )
    idle = (Idle({"steps": 1}, "every rollout has one step. Let a reward function return lists."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        steps: Literal["text", "turn", "token"] = param("text", "what a reward is of")
        separator: str = param("\n\n", "text that ends a step", only_if={"steps": "text"})
        eps: float = param(1e-4, "added to the standard deviation", ge=0)

    def start(self, run: Run) -> None:
        self._chat = run.chat

    def advantages(self, rollouts: Rollouts) -> Tensor:
        """That of the first token."""
        return rollouts.per_rollout.rows.rows(self._to_go(rollouts)[:, 0])

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        last = self._rewards(rollouts).length - 1
        rollout, step = rollouts.per_rollout.rows.index[tokens.row], self._step_of(rollouts, tokens)
        found = Groups(rollout, count=len(last)).max(step.double())
        self.log("steps", (last + 1).double().mean())
        self.log("unmatched", (found != last)[~found.isnan()].double().mean())
        return Shape(advantages=self._to_go(rollouts)[rollout, torch.minimum(step, last[rollout])])

    def _step_of(self, rollouts: Rollouts, tokens: Tokens) -> Tensor:
        """(tokens,) number of its step, from 0."""
        if self.params.steps == "token":
            return tokens.position
        turns, ids = rollouts.turns, rollouts.token_ids
        if turns is not None and tokens.turn is not None and self.params.steps == "turn":
            return turns.turn[tokens.turn]
        assert ids is not None and self._chat is not None  # in `needs`
        place = ids.completion.offsets[tokens.row] + tokens.position
        return separated(ids.completion, self.params.separator, self._chat)[place]

    def _rewards(self, rollouts: Rollouts) -> Jagged:
        """Of the steps of each rollout."""
        assert rollouts.step_rewards is not None  # in `needs`
        return rollouts.step_rewards.take(rollouts.per_rollout.last)

    def _to_go(self, rollouts: Rollouts) -> Tensor:
        """(rollouts, most steps of one) sum of z from each step on."""
        once = rollouts.per_rollout
        steps, reward = self._rewards(rollouts), rollouts.reward[once.last]
        hooked = reward - weighted_reward(rollouts.rewards, rollouts.reward_weights)[once.last].nan_to_num(nan=0.0)
        value, end, of = steps.values.clone(), steps.offsets[1:] - 1, spread(torch.arange(len(steps)), steps.length)
        value[end] = torch.where(hooked == 0, value[end], value[end].nan_to_num(nan=0.0) + hooked)
        value[reward.isnan()[of]] = torch.nan
        groups = Groups(once.groups.index[of], count=once.groups.count)
        centered, std = groups.center_and_std(value)
        table = torch.zeros(len(steps), max([1, *steps.length.tolist()]), dtype=torch.float64)
        table[of, places(steps.length)] = (centered / groups.rows(std + self.params.eps)).nan_to_num(nan=0.0)
        return table.flip(1).cumsum(1).flip(1)
