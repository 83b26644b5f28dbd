"""M-GRPO (arXiv 2511.13288): a main agent and its sub-agents, each compared with its own kind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_plugins import Groups, Idle, Method, MethodError, MethodParams, Rollouts, Shape, Tokens, from_params, param
from rl_plugins.kit.agents.turns import joint, normalized

_CLOSE = 1e-6  # a host may hold rewards in float32, where 0.1 is above 0.1
_OUTCOME = {"sub_reward": "outcome"}


class MGrpo(Method):
    """GRPO for a main agent that delegates to sub-agents: groups by role, and trajectories aligned to fixed numbers.

    Reconstruction: the alignment of trajectories and the treatment of a query without delegation are ours. Rewards and
    the sub-agent's format rule come from the authors' code, groups per query and agent from the paper.

    For a query, K rollouts of the main agent M are made; rollout k calls sub-agents d_k >= 0 times, and every call has
    its own trajectory and its own row. With the reward R_k of rollout k's main row and the format score f in {0, 1} of
    a sub-agent's row (its reward from the host's reward functions):

        R_S = 0            if f = 0
              sub_right    else if R_k > right_above          (1.0 and 0.1 in the code)
              sub_wrong    else                               (0.1)

        A = (R - mean(R)) / (std(R) + std_eps)      over the rows of the same query and the same agent, divisor n - 1

    Then the sub-agents' rows of every rollout are aligned to D = `sub_per_rollout`. If there are more, D stay, drawn
    without replacement. If there are fewer, copies of the rollout's own rows are added, drawn with replacement. A
    rollout without any gets D rows of its query (`fill_empty`). Statistics are those before. c copies of a row are one
    row with advantage c A.

    Symbols: rewards and advantages are (rows,) float64. Column `agent_column` has the agent's name, `main_agent` for M.
    Rows of rollout k differ in `index`; each holds its own agent's tokens only. Draws are from `self.rng`.

    Special cases: rows without a reward (NaN) count in no statistic; a sub-agent's row leaves, and its place is filled.
    If M's row has no reward, its sub-agents' rows have none. A row without another of its kind has A = 0 and a warning;
    equal rewards give 0. Several kinds of sub-agents form separate groups and share the D places.

    Raises:
        MethodError: rows do not say their agent, or no row is the main agent's.

    Source: arXiv 2511.13288; `MrlX-DeepResearch/agent_co_train/sub_agent_reward.py` (compute_format_score) and
    `sub_agent_multiturn.py` (reward_func) of the authors' code.
    """

    name = "m_grpo"
    fidelity = "reconstruction"
    does = "Trains a main agent and its sub-agents, each compared with its own kind"
    problems = ("agents",)
    needs = from_params(lambda p: {"tokens", "several_rollouts", f"column:{p.agent_column}"})
    rows_per_rollout = from_params(lambda p: 1 + p.sub_per_rollout)
    idle = (Idle({"calls": 0}, "no sub-agent was called. Check the prompt and `parse` of m_grpo_rollout."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        main_agent: str = param("main", "name of the main agent in `agent_column`")
        agent_column: str = param("agent", "name of the column with each row's agent")
        sub_reward: Literal["outcome", "own"] = param(
            "outcome", "a sub-agent's: format and outcome (code), or its own reward"
        )
        right_above: float = param(0.1, "reward above which the main agent is right", only_if=_OUTCOME)
        sub_right: float = param(1.0, "reward of a well-formed sub-agent if the main agent is right", only_if=_OUTCOME)
        sub_wrong: float = param(0.1, "reward of a well-formed sub-agent if the main agent is wrong", only_if=_OUTCOME)
        std_eps: float = param(1e-6, "constant added to the standard deviation", gt=0)
        align: bool = param(True, "alignment to `sub_per_rollout` rows per rollout; false: all rows stay")
        sub_per_rollout: int = param(4, "D, number of sub-agents' rows of a rollout in the aligned batch (ours)", ge=1)
        fill_empty: bool = param(True, "rows of other rollouts replace missing ones (ours)", only_if={"align": True})

    def rewards(self, rollouts: Rollouts) -> Tensor | None:
        """Sub-agents' rewards from their format score and the outcome of the main agent that called them."""
        p, own = self.params, rollouts.reward
        main, _ = self._agents(rollouts)
        if not bool(main.any()):
            names = sorted({str(a) for a in rollouts.meta[p.agent_column]})
            raise MethodError(
                f"no row of the batch is the main agent's: column `{p.agent_column}` has {', '.join(names)}, and "
                f"`main_agent` is {p.main_agent!r}. Set `main_agent` to the name the rollouts give it."
            )
        if p.sub_reward == "own":
            return None
        parent = Groups(joint(rollouts.group, rollouts.rollout))
        outcome = parent.rows(parent.mean(torch.where(main, own, torch.nan)))
        right = (outcome > p.right_above + _CLOSE).double()
        self.note(
            ~main,
            "sub-agent: format {format:.2f}, outcome of the main agent {outcome:.2f}",
            format=own,
            outcome=outcome,
        )
        reward = torch.where(own > 0, right * p.sub_right + (1 - right) * p.sub_wrong, 0.0)
        return torch.where(main, own, torch.where(torch.isnan(outcome + own), torch.nan, reward))

    def advantages(self, rollouts: Rollouts) -> Tensor:
        reward = rollouts.reward
        main, agent = self._agents(rollouts)
        groups = Groups(joint(rollouts.group, agent))
        if bool((groups.n(reward) == 1).any()):
            self.warn("a row has no other row of its query and agent to compare with, so its advantage is 0.")
        self.log("reward_main", reward[main].nanmean())
        self.log("reward_sub", reward[~main].nanmean())
        return torch.nan_to_num(normalized(reward, groups, True, self.params.std_eps), nan=0.0)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        """Sub-agents' rows leave or weigh as much as their copies."""
        p = self.params
        main, _ = self._agents(rollouts)
        sub = ~main & ~torch.isnan(rollouts.reward)
        copies = (main | sub).long()
        if p.align:
            copies[sub] = self._align(rollouts, sub)
        parents = Groups(joint(rollouts.group, rollouts.rollout))
        calls, made = parents.sum((~main).double()), copies[~main].sum()
        self.log("calls", calls.mean(), weight=parents.count)
        self.log("without_calls", (calls == 0).double().mean(), weight=parents.count)
        self.log("dropped", (copies[~main] == 0).double().sum() / calls.sum().clamp(min=1))
        self.log("copies", (copies[~main] - 1).clamp(min=0).sum() / made.clamp(min=1))
        return Shape(advantages=tokens.advantages * copies[tokens.row], keep_rows=copies > 0)

    def _align(self, rollouts: Rollouts, sub: Tensor) -> Tensor:
        """How often each sub-agent's row is in the aligned batch, in the order of the rows."""
        parent = joint(rollouts.group, rollouts.rollout)  # numbered in the order of query and rollout
        query_of = torch.zeros(int(parent.max()) + 1 if len(parent) else 0, dtype=torch.int64)
        query_of[parent] = joint(rollouts.group)
        order = torch.sort(rollouts.index[sub], stable=True).indices
        order = order[torch.sort(parent[sub][order], stable=True).indices]
        counts = torch.zeros(len(order), dtype=torch.int64)
        size, fill = self.params.sub_per_rollout, self.params.fill_empty
        counts[order] = alignment(parent[sub][order], query_of, size, self.rng("align"), fill)
        return counts

    def _agents(self, rollouts: Rollouts) -> tuple[Tensor, Tensor]:
        """(rows,) bool, the main agent's; and (rows,) int64, a number for every name."""
        p = self.params
        if p.agent_column not in rollouts.meta:
            raise MethodError(
                f"there is no column `{p.agent_column}`, so the agent of a row is not known. Let the agent loop, the "
                f"rollout program or the dataset give every row the name of its agent, or set `agent_column`."
            )
        names = [str(a) for a in rollouts.meta[p.agent_column]]
        number = {name: i for i, name in enumerate(sorted(set(names)))}
        agent = torch.tensor([number[name] for name in names], dtype=torch.int64)
        return agent == number.get(p.main_agent, -1), agent


def alignment(
    rollout: Tensor, query_of: Tensor, size: int, rng: np.random.Generator, fill_empty: bool = True
) -> Tensor:
    """How often each sub-trajectory occurs in a batch of `size` per rollout.

    Args:
        rollout: (subs,) int64, ascending: the rollout that called it. query_of: (rollouts,) int64, ascending: the query
        of each rollout, also of those without calls. size: sub-trajectories per rollout; of more, a uniform draw
        without replacement stays, and to fewer, draws with
            replacement from the rollout's own are added.
        fill_empty: a rollout without any gets `size` draws from its query, if that has any.

    Returns:
        (subs,) int64.
    """
    rollouts = Groups(rollout, count=len(query_of))
    queries = Groups(query_of[rollout], count=int(query_of.max()) + 1 if len(query_of) else 0)
    called = rollouts.size
    counts = rollouts.top_k(torch.from_numpy(rng.random(len(rollout))), size).long()
    # Where the missing ones are drawn from: `many` sub-trajectories from `first` on, the rollout's or its query's.
    empty = called == 0
    many = torch.where(empty, queries.size[query_of] * fill_empty, called)
    first = torch.where(
        empty, (torch.cumsum(queries.size, 0) - queries.size)[query_of], torch.cumsum(called, 0) - called
    )
    missing = torch.where(many > 0, (size - called).clamp(min=0), 0)
    draw = torch.from_numpy(rng.random(int(missing.sum())))
    many, first = many.repeat_interleave(missing), first.repeat_interleave(missing)
    picked = first + (draw * many).long()
    return counts + torch.bincount(picked, minlength=len(rollout))


# ---- the authors' format rule

_BLOCK = r"<{0}>(?:(?!</?(?:thinking|tool_call|result)>).)*</{0}>"
_THINKING, _CALL, _RESULT = (_BLOCK.format(tag) for tag in ("thinking", "tool_call", "result"))
_TURN = re.compile(rf"\s*(?:{_THINKING}\s*)?{_CALL}\s*", re.DOTALL)
_RESPONSE = re.compile(r"\s*<tool_response>.*</tool_response>\s*", re.DOTALL)
_FINAL = re.compile(rf"\s*{_THINKING}\s*{_RESULT}\s*", re.DOTALL)


def sub_agent_format(messages: Sequence[Mapping[str, Any]]) -> float:
    """1 if a sub-agent's messages have the authors' format, else 0.

    An odd number of messages, assistant and user in turn, follows the system and the user message. They are calls
    (optional thinking, one tool call), each answered by a tool response, and at the end thinking and a result, with no
    text outside the blocks. Without messages the score is 1, as in the code. Two rules are ours: white space around
    blocks is ignored, and blocks do not nest.

    Args:
        messages: mappings with `role` and `content` (text), from the system message on.
    """
    if len(messages) < 2:
        return 0.0
    turns = messages[2:]
    if not turns:
        return 1.0
    wanted = [("assistant", _TURN), ("user", _RESPONSE)] * (len(turns) // 2) + [("assistant", _FINAL)]
    if len(wanted) != len(turns):
        return 0.0
    good = (m["role"] == role and form.fullmatch(m["content"]) for m, (role, form) in zip(turns, wanted, strict=True))
    return float(all(good))
