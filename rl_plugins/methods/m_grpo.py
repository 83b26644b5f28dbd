"""M-GRPO (arXiv 2511.13288): a main agent and its sub-agents, each compared with its own kind."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_plugins import (
    Groups,
    Idle,
    Method,
    MethodError,
    MethodParams,
    Rollouts,
    Shape,
    Tokens,
    from_params,
    param,
    signals,
)
from rl_plugins.core.groups import joint

_CLOSE = 1e-6  # a host may hold rewards in float32, where 0.1 is above 0.1
_OUTCOME, _COMPOSITE = {"sub_reward": "outcome"}, {"sub_reward": "composite"}
_MADE = {"sub_reward": ("composite", "outcome")}


class MGrpo(Method):
    """GRPO for a main agent that delegates to sub-agents: groups by role, and trajectories aligned to fixed numbers.

    For a query, K rollouts of the main agent M are made; rollout k calls sub-agents d_k >= 0 times, and every call has
    its own trajectory and its own row. With the reward R_k of rollout k's main row, c_k = [R_k > right_above], the
    format score f in {0, 1} of a sub-agent's row and an expert's judgment e in [0, 1] of it:

        R_S = 0                                                                      if f = 0
              format_weight + correct_weight c_k + expert_weight e                   `composite` (paper: .1, .4, .5)
              sub_right if c_k else sub_wrong                                        `outcome` (code: 1 and 0.1)

    f > 0 is the row's own reward from the host's reward functions, and e the column `expert_column`; without a column
    the row's own reward is e, too. The main agent's reward is the user's; `main_reward` is the paper's.

    The sub-agents' rows of every rollout are aligned to d = `sub_per_rollout`. If there are more, d stay, drawn without
    replacement. If there are fewer, copies of the rollout's own rows are added, drawn with replacement. A rollout
    without any gets d rows of its query (`fill_empty`, ours). With n the rows of the same query and the same agent,

        A = (R - mean(R)) / (std(R) + std_eps)      divisor n - `ddof`; n counts copies (`statistics: aligned`), or the
                                                    rows as they were made (`before`)

    c copies of a row are one row with advantage c A. `m_grpo_ratio` has the paper's importance ratio of the whole
    trajectory. The authors' code has the host's ratio of each token, no alignment, `sub_reward: outcome`, `ddof: 1` and
    `std_eps: 1e-6`.

    Symbols: rewards and advantages are (rows,) float64. Column `agent_column` has the agent's name, `main_agent` for M.
    Rows of rollout k differ in `index`; each holds its own agent's tokens only. Draws are from `self.rng`.

    Special cases: rows without a reward (NaN) count in no statistic; a sub-agent's row leaves, and its place is filled.
    If M's row has no reward, its sub-agents' rows have none. A row without another of its kind has A = 0 and a warning;
    equal rewards give 0. Several kinds of sub-agents form separate groups and share the d places.

    Raises:
        MethodError: rows do not say their agent, no row is the main agent's, or an expert's judgment is no number.

    Source: arXiv 2511.13288v2, eq. 4, 5, 9 to 13 and sections 4.2 and 5.1;
    `MrlX-DeepResearch/agent_co_train/sub_agent_reward.py` (compute_format_score) and `sub_agent_multiturn.py`
    (reward_func) of the authors' code at 0d04788.
    """

    name = "m_grpo"
    fidelity = "paper"
    does = "Trains a main agent and its sub-agents, each compared with its own kind"
    problems = ("agents",)
    needs = from_params(lambda p: signals("several_rollouts", columns=(p.agent_column, p.expert_column)))
    rows_per_rollout = from_params(lambda p: 1 + p.sub_per_rollout)
    idle = (Idle({"calls": 0}, "no sub-agent was called. Check the prompt and `parse` of m_grpo_rollout."),)

    @dataclass(frozen=True)
    class Params(MethodParams):
        main_agent: str = param("main", "name of the main agent in `agent_column`")
        agent_column: str = param("agent", "name of the column with each row's agent")
        sub_reward: Literal["composite", "outcome", "own"] = param(
            "composite", "a sub-agent's: format, outcome and expert (paper), the first two (code), or its own reward"
        )
        right_above: float = param(0.1, "reward above which the main agent is right", only_if=_MADE)
        format_weight: float = param(0.1, "beta_1, reward of a sub-agent's valid format", ge=0, only_if=_COMPOSITE)
        correct_weight: float = param(0.4, "beta_2, weight of the main agent's outcome", ge=0, only_if=_COMPOSITE)
        expert_weight: float = param(0.5, "beta_3, weight of the expert's judgment", ge=0, only_if=_COMPOSITE)
        expert_column: str = param(
            "", "name of the column with the expert's judgment; empty: the row's own reward", only_if=_COMPOSITE
        )
        sub_right: float = param(1.0, "reward of a well-formed sub-agent if the main agent is right", only_if=_OUTCOME)
        sub_wrong: float = param(0.1, "reward of a well-formed sub-agent if the main agent is wrong", only_if=_OUTCOME)
        statistics: Literal["aligned", "before"] = param(
            "aligned", "rows that mean and deviation count: with their copies, or as made", only_if={"align": True}
        )
        ddof: Literal[0, 1] = param(0, "subtracted from n in the deviation's divisor (code: 1)")
        std_eps: float = param(0.0, "constant added to the standard deviation (code: 1e-6)", ge=0)
        align: bool = param(True, "alignment to `sub_per_rollout` rows per rollout; false: all rows stay (code)")
        sub_per_rollout: int = param(8, "d, number of sub-agents' rows of a rollout in the aligned batch", ge=1)
        fill_empty: bool = param(True, "rows of other rollouts replace missing ones (ours)", only_if={"align": True})

    def rewards(self, rollouts: Rollouts) -> Tensor | None:
        """Sub-agents' rewards from their format, the main agent that called them, and an expert."""
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
        if p.sub_reward == "outcome":
            reward = torch.where(own > 0, right * p.sub_right + (1 - right) * p.sub_wrong, 0.0)
            known = outcome + own
        else:
            expert = self._judged(rollouts, main) if p.expert_column else own
            weights = (p.format_weight, p.correct_weight, p.expert_weight)
            reward = sub_reward(own, right, expert, weights)
            known = outcome + own + torch.where(own > 0, expert, 0.0)
        return torch.where(main, own, torch.where(torch.isnan(known), torch.nan, reward))

    def advantages(self, rollouts: Rollouts) -> Tensor:
        p, reward = self.params, rollouts.reward
        main, agent = self._agents(rollouts)
        groups = Groups(joint(rollouts.group, agent))
        if bool((groups.n(reward) == 1).any()):
            self.warn("a row has no other row of its query and agent to compare with, so its advantage is 0.")
        self.log("reward_main", reward[main].nanmean())
        self.log("reward_sub", reward[~main].nanmean())
        copies = self._copies(rollouts, main) if p.statistics == "aligned" else torch.ones_like(rollouts.group)
        return aligned_advantages(reward, copies, groups, p.ddof, p.std_eps)

    def shape(self, rollouts: Rollouts, tokens: Tokens) -> Shape:
        """Sub-agents' rows leave or weigh as much as their copies."""
        main, _ = self._agents(rollouts)
        copies = self._copies(rollouts, main)
        parents = Groups(joint(rollouts.group, rollouts.rollout))
        calls, made = parents.sum((~main).double()), copies[~main].sum()
        self.log("calls", calls.mean(), weight=parents.count)
        self.log("without_calls", (calls == 0).double().mean(), weight=parents.count)
        self.log("dropped", (copies[~main] == 0).double().sum() / calls.sum().clamp(min=1))
        self.log("copies", (copies[~main] - 1).clamp(min=0).sum() / made.clamp(min=1))
        return Shape(row_factor=copies, keep_rows=copies > 0)

    def _judged(self, rollouts: Rollouts, main: Tensor) -> Tensor:
        """(rows,) float64 the expert's judgments; NaN where there is none, and for main agents."""
        column = self.params.expert_column
        given = [None if m else e for m, e in zip(main.tolist(), rollouts.meta[column], strict=True)]
        try:
            return torch.tensor([torch.nan if e is None else float(e) for e in given], dtype=torch.float64)
        except (TypeError, ValueError) as error:
            raise MethodError(
                f"column `{column}` of a sub-agent's row has no number ({error}). It must hold a number from 0 to 1, "
                f"or None where there is no judgment."
            ) from error

    def _copies(self, rollouts: Rollouts, main: Tensor) -> Tensor:
        """(rows,) int64 how often each row is in the aligned batch: the same in every hook of a batch."""
        sub = ~main & ~torch.isnan(rollouts.reward)
        copies = (main | sub).long()
        if self.params.align:
            copies[sub] = self._align(rollouts, sub)
        return copies

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


def main_reward(valid: Tensor, correct: Tensor, format_weight: float = 0.1, correct_weight: float = 0.9) -> Tensor:
    """The main agent's reward in the paper (eq. 4): `format_weight + correct_weight * correct`, or 0 where its format
    is not valid.

    Args:
        valid: (rows,) above 0 where the format is valid. correct: (rows,) from 0 to 1.
    """
    return torch.where(valid > 0, format_weight + correct_weight * correct, 0.0)


def sub_reward(
    valid: Tensor, correct: Tensor, expert: Tensor, weights: tuple[float, float, float] = (0.1, 0.4, 0.5)
) -> Tensor:
    """A sub-agent's reward in the paper (eq. 5), or 0 where its format is not valid.

    Args:
        valid: (rows,) above 0 where the format is valid. correct: (rows,) outcome of the main agent that called it.
        expert: (rows,) judgment of its own work, from 0 to 1.
        weights: of format, outcome and judgment.
    """
    of_format, of_outcome, of_expert = weights
    return torch.where(valid > 0, of_format + of_outcome * correct + of_expert * expert, 0.0)


def aligned_advantages(reward: Tensor, copies: Tensor, groups: Groups, ddof: int = 0, eps: float = 0.0) -> Tensor:
    """(rows,) `(R - mean) / (std + eps)` of a batch in which each row is there as often as it has copies (eq. 9, 10, 12
    and 13); 0 where all rewards are equal, and for rows without one.

    Args:
        reward: (rows,) float64, NaN: in no statistic.
        copies: (rows,) int64, 0: the row is not in the batch.
        groups: rows that are compared.
        ddof: the deviation has the divisor n - ddof.
    """
    mean, std = copied_statistics(reward, copies, groups, ddof)
    return ((reward - groups.rows(mean)) / groups.rows(std + eps)).nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)


def copied_statistics(reward: Tensor, copies: Tensor, groups: Groups, ddof: int = 0) -> tuple[Tensor, Tensor]:
    """(groups,) mean and deviation of rewards that count as often as they have copies. Equal rewards have exactly that
    mean and the deviation 0. Arguments as of `aligned_advantages`."""
    counted = torch.where(copies > 0, reward, torch.nan)
    weight = torch.where(torch.isnan(counted), 0.0, copies.double())
    anchor = groups.min(counted)
    n, away = groups.sum(weight), counted - groups.rows(anchor)
    shift = groups.sum(weight * away) / n
    square = groups.sum(weight * (away - groups.rows(shift)) ** 2)
    return anchor + shift, torch.where(n > ddof, (square / (n - ddof)).sqrt(), 0.0)


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
