"""Rollouts, tokens, plans and micro-batches made by hand, as a host adapter would hand them to a method."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.groups import Groups
from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import (
    RAGGED,
    Jagged,
    Plan,
    PlanRow,
    Rollouts,
    Rows,
    Run,
    Terms,
    TokenIds,
    Tokens,
    TurnTable,
    weighted_reward,
)
from rl_plugins.runtime.decide import Decision, decide, select_rows, teacher_prompts
from rl_plugins.runtime.stack import MethodStack


def make_run(**changes: Any) -> Run:
    """A run as `start` sees it: 16 prompts, groups of 4, 100 steps."""
    facts: dict[str, Any] = dict(
        host="trl",
        host_version="0",
        dataset=None,
        dataset_size=16,
        columns=("prompt", "answer"),
        reward_names=("accuracy", "format"),
        group_size=4,
        total_steps=100,
        total_batches=100,
        max_completion_length=12,
    )
    return Run(**{**facts, **changes})


def start_stack(*methods: Method, seed: int = 0, run: Run | None = None) -> MethodStack:
    """A stack of these instances, checked and started."""
    stack, run = MethodStack(list(methods), seed), run or make_run()
    stack.check(run)
    stack.start(run)
    return stack


def make_plan(prompts: int = 4, group_size: int = 4, budget: int | None = None, **changes: Any) -> Plan:
    """The host's own plan: `group_size` rollouts for each of `prompts` prompts."""
    rows = tuple(PlanRow(prompt_index=i, group=i, n=group_size) for i in range(prompts))
    return Plan(rows, group_size, prompts * group_size if budget is None else budget, **changes)


def make_rollouts(
    rewards: Any,
    group: Sequence[int] | None = None,
    group_size: int = 4,
    *,
    weights: Sequence[float] | None = None,
    lengths: Sequence[int] | None = None,
    prompt_index: Sequence[int] | None = None,
    **changes: Any,
) -> Rollouts:
    """Rollouts with these rewards.

    Args:
        rewards: (rows,) one reward function, or (rows, functions); NaN = None.
        group: group number per row; default contiguous groups of `group_size`.
        lengths: tokens per row, `length` of the rollouts; default 1, 2, 3, 4, 1, ..
        prompt_index: default the group number.
    """
    rewards = torch.as_tensor(rewards, dtype=torch.float64)
    rewards = rewards[:, None] if rewards.ndim == 1 else rewards
    n, functions = rewards.shape
    ids = torch.arange(n) // group_size if group is None else torch.as_tensor(group, dtype=torch.int64)
    weight = torch.ones(functions, dtype=torch.float64) if weights is None else torch.as_tensor(weights).double()
    length = torch.arange(n) % 4 + 1 if lengths is None else torch.as_tensor(lengths, dtype=torch.int64)
    seen: dict[int, int] = {}
    rollout = [seen[g] for g in ids.tolist() if seen.update({g: seen.get(g, -1) + 1}) is None]
    values: dict[str, Any] = dict(
        group=ids,
        prompt_index=ids.clone() if prompt_index is None else torch.as_tensor(prompt_index),
        rollout=torch.tensor(rollout, dtype=torch.int64),
        index=torch.zeros(n, dtype=torch.int64),
        rewards=rewards,
        reward_names=tuple(f"reward_{i}" for i in range(functions)),
        reward_weights=weight,
        reward=weighted_reward(rewards, weight),
        length=length,
        truncated=torch.zeros(n, dtype=torch.bool),
        kept=torch.ones(n, dtype=torch.bool),
        version=torch.zeros(n, dtype=torch.int64),
        batch=0,
    )
    for name, value in changes.items():
        if isinstance(values.get(name), torch.Tensor):  # a list, too
            changes[name] = torch.as_tensor(value, dtype=values[name].dtype)
    return Rollouts(**{**values, **changes})


def make_turns(
    anchor: Sequence[Sequence[Any]],
    reward: Sequence[Sequence[float]] | None = None,
    valid: Sequence[Sequence[bool]] | None = None,
    row_per: Literal["rollout", "turn"] = "rollout",
) -> TurnTable:
    """Turns of agents: one list per rollout, in it one entry per turn.

        rollouts = make_rollouts([1.0, 0.0], turns=make_turns([["start", "door"], ["start"]], [[0, 1], [0]]))

    Args:
        anchor: what was observed before each turn.
        reward: of each turn, NaN where the environment gave none; default NaN.
        valid: False where the action was not understood; default True.
        row_per: "rollout": row i holds all turns of list i; "turn": every turn is a row, in the order of the lists.
    """
    turns = torch.tensor([len(a) for a in anchor], dtype=torch.int64)
    rollout = torch.repeat_interleave(torch.arange(len(turns)), turns)
    number = torch.arange(len(rollout))

    def flat(values: Sequence[Sequence[Any]]) -> list[Any]:
        if [len(v) for v in values] != turns.tolist():
            raise ValueError(f"{[len(v) for v in values]} entries per rollout for {turns.tolist()} turns.")
        return [v for of_rollout in values for v in of_rollout]

    return TurnTable(
        row=rollout if row_per == "rollout" else number,
        turn=number - (torch.cumsum(turns, 0) - turns)[rollout],
        anchor=flat(anchor),
        reward=torch.tensor([torch.nan] * len(number) if reward is None else flat(reward), dtype=torch.float64),
        valid=torch.tensor([True] * len(number) if valid is None else flat(valid), dtype=torch.bool),
    )


def one_row_per_turn(rollouts: Rollouts, tokens: Tokens) -> tuple[Rollouts, Tokens]:
    """The same rollouts in the other layout: from a row per rollout, as TRL has them, to a row per turn (`index` is
    its number), as some of verl's agent loops have them. Row i is turn i of `rollouts.turns`; tokens keep their order.

    Raises:
        ValueError: without turns, or if the tokens do not know theirs.
    """
    table = rollouts.turns
    if table is None or tokens.turn is None:
        raise ValueError("rollouts.turns and tokens.turn are needed to make a row of every turn.")
    order = torch.sort(tokens.turn, stable=True).indices
    length = torch.bincount(tokens.turn, minlength=len(table.row))
    position = torch.empty_like(tokens.turn)
    position[order] = torch.arange(len(order)) - (torch.cumsum(length, 0) - length)[tokens.turn[order]]
    turns = Groups(table.row, count=len(rollouts))
    last = table.turn == turns.rows(turns.max(table.turn.double()))
    rows = take_rows(rollouts, table.row)
    return (
        rows.replace(
            index=table.turn,
            length=length,
            truncated=rows.truncated & last,
            turns=table.replace(row=torch.arange(len(table.row))),
        ),
        tokens.replace(row=tokens.turn, position=position),
    )


def take_rows(rollouts: Rollouts, rows: Tensor) -> Rollouts:
    """Rows of these numbers, in this order, as often as they are named; without turns."""
    order, changes = rows.tolist(), {}
    for f in dataclasses.fields(rollouts):
        value = getattr(rollouts, f.name)
        if f.name in ("reward_names", "reward_weights", "meta", "turns", *RAGGED) or isinstance(value, int):
            continue
        changes[f.name] = value[rows] if isinstance(value, Tensor) else value and [value[i] for i in order]
    changes["meta"] = {name: [values[i] for i in order] for name, values in rollouts.meta.items()}
    for name in RAGGED:
        if (ragged := getattr(rollouts, name)) is not None:
            changes[name] = ragged.take(rows)
    return rollouts.replace(**changes, turns=None)


def make_token_ids(rollouts: Rollouts, seed: int = 0) -> TokenIds:
    """Prompts of 2 tokens that tell them apart, and completions of `rollouts.length`; in every third row there is one
    more behind them, which was only read. So `make_tokens` has their places."""
    rng = np.random.default_rng(seed)
    read = [int(i % 3 == 2) for i in range(len(rollouts))]
    sizes = [n + r for n, r in zip(rollouts.length.tolist(), read, strict=True)]
    return TokenIds.cat(
        prompt=[torch.tensor([10 + p % 80, 10 + p // 80 % 80]) for p in rollouts.prompt_index.tolist()],
        completion=[torch.from_numpy(rng.integers(10, 90, n)) for n in sizes],
        observed=[torch.arange(n) >= n - r for n, r in zip(sizes, read, strict=True)],
    )


def make_step_rewards(rollouts: Rollouts, most: int = 3) -> Jagged:
    """One to `most` steps a row, that share its reward; every fifth of several has none (NaN)."""
    steps = torch.arange(len(rollouts)) % most + 1
    values = torch.repeat_interleave(rollouts.reward / steps, steps)
    number = torch.arange(len(values))
    values[(number % 5 == 4) & (torch.repeat_interleave(steps, steps) > 1)] = torch.nan
    return Jagged.of(values, steps)


def make_tokens(rollouts: Rollouts, seed: int = 0, advantages: Tensor | None = None, **changes: Any) -> Tokens:
    """`rollouts.length` tokens per row with random columns (all of them; a host fills what is needed). The tokens of a
    row with several turns are dealt to them evenly, in order."""
    row = torch.repeat_interleave(torch.arange(len(rollouts)), rollouts.length)
    position = torch.arange(len(row)) - (torch.cumsum(rollouts.length, 0) - rollouts.length)[row]
    n, rng = len(row), np.random.default_rng(seed)

    def logprobs(scale: float) -> Tensor:
        return torch.from_numpy(-np.abs(rng.normal(size=n)) * scale).float()

    old = logprobs(1.0)
    p = old.exp()
    values: dict[str, Any] = dict(
        row=row,
        position=position,
        turn=_dealt_to_turns(rollouts, row, position),
        advantages=torch.zeros(n, dtype=torch.float64) if advantages is None else advantages[row].double(),
        keep=torch.ones(n, dtype=torch.bool),
        forced=torch.zeros(n, dtype=torch.bool),
        old_logprobs=old,
        rollout_logprobs=old + 0.1 * logprobs(1.0),
        ref_logprobs=old + 0.1 * logprobs(1.0),
        entropies=-logprobs(0.7),
        teacher_logprobs=old + 0.1 * logprobs(1.0),
        sum_squared_probs=p**2 + 0.3 * (1 - p) ** 2,
        version=rollouts.version[row],
    )
    return Tokens(**{**values, **changes})


def _dealt_to_turns(rollouts: Rollouts, row: Tensor, position: Tensor) -> Tensor | None:
    """(tokens,) the turn of each token, if there are turns."""
    table = rollouts.turns
    if table is None:
        return None
    turns = torch.bincount(table.row, minlength=len(rollouts))
    if bool((turns[row] == 0).any()):
        raise ValueError("a row with tokens has no turn in rollouts.turns; give it one, or lengths of 0.")
    by_turn = torch.sort(table.turn, stable=True).indices
    in_order = by_turn[torch.sort(table.row[by_turn], stable=True).indices]
    number = position * turns[row] // rollouts.length[row]
    return in_order[(torch.cumsum(turns, 0) - turns)[row] + number]


def make_terms(
    rows: int = 4,
    time: int = 6,
    seed: int = 0,
    mask: Tensor | None = None,
    columns: Mapping[str, Tensor] | None = None,
    **changes: Any,
) -> Terms:
    """A padded micro-batch with gradient on `logprobs` and `entropies`; ragged lengths and a hole in the mask."""
    rng = np.random.default_rng(seed)

    def normal(scale: float) -> Tensor:
        return torch.from_numpy(rng.normal(size=(rows, time)) * scale).float()

    if mask is None:
        length = torch.from_numpy(rng.integers(1, time + 1, size=rows))
        mask = (torch.arange(time)[None] < length[:, None]).long()
        if rows > 1 and time > 2:
            mask[0], mask[0, 1] = 1, 0
    old = -normal(1.0).abs() - 0.05
    values: dict[str, Any] = dict(
        mask=mask,
        logprobs=(old + normal(0.2)).requires_grad_(),
        entropies=normal(0.5).abs().requires_grad_(),
        advantages=normal(1.0)[:, :1].expand(rows, time),
        old_logprobs=old,
        rollout_logprobs=old + normal(0.1),
        ref_logprobs=old + normal(0.1),
        num_tokens=mask.sum().float(),
        num_rows=(mask.sum(1) > 0).sum().float(),
        max_length=time,
        columns=dict(columns or {}),
        versions=torch.zeros(rows, time, dtype=torch.int64),
    )
    return Terms(**{**values, **changes})


def make_rows(
    rollouts: Rollouts, tokens: Tokens, columns: Mapping[str, Tensor] | None = None, drift: float = 0.1
) -> Rows:
    """Row sums of one optimizer step that holds all these rollouts; `drift` per token separates new from old."""
    n = len(rollouts)
    old = torch.bincount(tokens.row, tokens.old_logprobs, minlength=n).double()
    behavior = torch.bincount(tokens.row, tokens.rollout_logprobs, minlength=n).double()
    return Rows(
        group=rollouts.group,
        length=rollouts.length,
        old_logprobs=old,
        rollout_logprobs=behavior,
        logprobs=old - drift * rollouts.length,
        columns=dict(columns or {}),
        version=rollouts.version,
        newest_version=rollouts.newest_version,
        current_version=rollouts.current_version,
        steps_since_published=rollouts.steps_since_published,
    )


def one_step(
    stack: MethodStack, rollouts: Rollouts, tokens: Tokens | None = None, budget: int | None = None
) -> Decision:
    """All decisions of one generation batch, as a host adapter takes them."""
    tokens = make_tokens(rollouts) if tokens is None else tokens
    budget = len(rollouts) if budget is None else budget
    selection = select_rows(stack, rollouts)
    if "teacher_logprobs" in stack.token_columns:
        tokens = read_by_teacher(tokens, teacher_prompts(stack, selection))
    return decide(stack, rollouts, tokens, None, grpo_advantages, budget, selection)


def read_by_teacher(tokens: Tokens, prompts: Sequence[Any] | None) -> Tokens:
    """The tokens with NaN in the place of log-probs of a teacher, where a row has no prompt for it."""
    if prompts is None:
        return tokens
    assert tokens.teacher_logprobs is not None  # of `make_tokens`
    read = torch.tensor([p is not None for p in prompts], dtype=torch.bool)
    return tokens.replace(teacher_logprobs=torch.where(read[tokens.row], tokens.teacher_logprobs, torch.nan))
