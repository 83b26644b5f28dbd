"""Rollouts, tokens, plans and micro-batches made by hand, as a host adapter would hand them to a method."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.driver import Decision, decide
from rl_plugins.estimators import grpo_advantages
from rl_plugins.method import Method
from rl_plugins.rollouts import Plan, PlanRow, Rollouts, Rows, Run, Terms, Tokens, weighted_reward
from rl_plugins.stack import MethodStack


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
        generation_steps=100,
        max_completion_length=12,
    )
    return Run(**{**facts, **changes})


def start_stack(*methods: Method, seed: int = 0, run: Run | None = None) -> MethodStack:
    """A stack of these instances, started."""
    stack = MethodStack(list(methods), seed)
    stack.start(run or make_run())
    return stack


def make_plan(prompts: int = 4, group_size: int = 4, budget: int | None = None, **changes: Any) -> Plan:
    """The host's own plan: `group_size` rollouts for each of `prompts` prompts."""
    rows = tuple(PlanRow(prompt=i, group=i, n=group_size) for i in range(prompts))
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
        lengths: tokens per row; default 1, 2, 3, 4, 1, ..
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
        step=0,
        total_steps=100,
    )
    return Rollouts(**{**values, **changes})


def make_tokens(rollouts: Rollouts, seed: int = 0, advantages: Tensor | None = None, **changes: Any) -> Tokens:
    """`rollouts.length` tokens per row with random columns (all of them; a host fills what is needed)."""
    row = torch.repeat_interleave(torch.arange(len(rollouts)), rollouts.length)
    start = torch.cumsum(rollouts.length, 0) - rollouts.length
    n, rng = len(row), np.random.default_rng(seed)

    def logprobs(scale: float) -> Tensor:
        return torch.from_numpy(-np.abs(rng.normal(size=n)) * scale).float()

    old = logprobs(1.0)
    values: dict[str, Any] = dict(
        row=row,
        position=torch.arange(n) - start[row],
        advantages=torch.zeros(n, dtype=torch.float64) if advantages is None else advantages[row].double(),
        keep=torch.ones(n, dtype=torch.bool),
        forced=torch.zeros(n, dtype=torch.bool),
        old_logprobs=old,
        rollout_logprobs=old + 0.1 * logprobs(1.0),
        ref_logprobs=old + 0.1 * logprobs(1.0),
        entropies=-logprobs(0.7),
    )
    return Tokens(**{**values, **changes})


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
    )


def one_step(
    stack: MethodStack, rollouts: Rollouts, tokens: Tokens | None = None, budget: int | None = None
) -> Decision:
    """All decisions of one generation batch, as a host adapter takes them."""
    tokens = make_tokens(rollouts) if tokens is None else tokens
    return decide(stack, rollouts, tokens, None, grpo_advantages, len(rollouts) if budget is None else budget)
