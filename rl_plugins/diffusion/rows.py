"""Rows of a batch: samples as each rank holds them, and as the driver sees them. Tokens are transitions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.denoising import Sample, Transition
from rl_plugins.core.rollouts import PlanRow, Rollouts, Tokens, weighted_reward
from rl_plugins.diffusion.rewards import Rewards
from rl_plugins.runtime.preflight import no_row_has
from rl_plugins.runtime.stack import MethodStack


@dataclass(frozen=True)
class LocalRow:
    """A sample of this rank.

    Args:
        place: of its prompt in the plan.
        condition: what the policy was given.
        sample: with its rewards.
        tokens: its transitions that may be trained.
    """

    place: int
    condition: Any
    sample: Sample
    tokens: tuple[Transition, ...]


@dataclass(frozen=True)
class Outline:
    """What the driver is told of a row: everything but latents.

    Args:
        plan: place of its row in the plan.
        label: of a group of its own, or None.
        rewards: by function. meta: what its program noted.
        steps, logprobs: (tokens,) of its tokens.
        ref_logprobs: the same of the reference, if somebody needs them.
    """

    plan: int
    label: Any
    rewards: Mapping[str, float]
    meta: Mapping[str, Any]
    steps: Tensor
    logprobs: Tensor
    ref_logprobs: Tensor | None


def outlines(rows: Sequence[LocalRow], ref: Sequence[Tensor] | None) -> list[Outline]:
    """Of a rank's rows.

    Args:
        ref: log-densities of the reference of each row.
    """
    return [
        Outline(
            plan=row.place,
            label=row.sample.group,
            rewards=dict(row.sample.rewards or {}),
            meta=dict(row.sample.meta),
            steps=torch.tensor([t.step for t in row.tokens], dtype=torch.int64),
            logprobs=torch.tensor([t.logprob for t in row.tokens], dtype=torch.float32),
            ref_logprobs=None if ref is None else ref[i],
        )
        for i, row in enumerate(rows)
    ]


def rollouts_of(
    stack: MethodStack,
    plan: Sequence[PlanRow],
    rows: Sequence[Outline],
    rewards: Rewards,
    columns: Callable[[PlanRow], Mapping[str, Any]],
    version: int,
) -> tuple[Rollouts, Tokens | None]:
    """All ranks' rows as the driver sees them; tokens where somebody reads them.

    Args:
        plan: of all ranks.
        columns: plan row -> its dataset row.
        version: published weights that made the samples.
    """
    group, number = _numbers(plan, rows)
    given = torch.tensor([[row.rewards.get(n, torch.nan) for n in rewards.names] for row in rows], dtype=torch.float64)
    given = given.reshape(len(rows), len(rewards.names))
    length = torch.tensor([len(row.steps) for row in rows], dtype=torch.int64)
    plans = [plan[row.plan] for row in rows]
    needed = sorted(n.removeprefix("column:") for n in stack.needs if n.startswith("column:"))
    found = [{**columns(p), **row.meta} for p, row in zip(plans, rows, strict=True)] if needed else []
    for name in needed:
        if rows and not any(name in row for row in found):
            raise no_row_has(name, [m.name for m in stack.methods if f"column:{name}" in m.needs])
    rollouts = Rollouts(
        group=torch.tensor(group, dtype=torch.int64),
        prompt_index=torch.tensor([p.prompt_index for p in plans], dtype=torch.int64),
        rollout=torch.tensor(number, dtype=torch.int64),
        index=torch.zeros(len(rows), dtype=torch.int64),
        rewards=given,
        reward_names=rewards.names,
        reward_weights=rewards.weights,
        reward=weighted_reward(given, rewards.weights),
        length=length,
        truncated=torch.zeros(len(rows), dtype=torch.bool),
        kept=torch.ones(len(rows), dtype=torch.bool),
        version=torch.full((len(rows),), version),
        current_version=version,
        meta={name: [row.get(name) for row in found] for name in needed},
        payload=[p.payload for p in plans],
        batch=stack.batch,
    )
    return rollouts, _tokens_of(stack, rows, length, version) if stack.reads_tokens else None


def _tokens_of(stack: MethodStack, rows: Sequence[Outline], length: Tensor, version: int) -> Tokens:
    count, wanted = int(length.sum()), stack.token_columns

    def joined(parts: list[Tensor]) -> Tensor:
        return torch.cat(parts) if parts else torch.zeros(0)

    logprobs = joined([row.logprobs for row in rows])
    return Tokens(
        row=torch.repeat_interleave(torch.arange(len(rows)), length),
        position=joined([row.steps for row in rows]).long(),
        advantages=torch.zeros(count, dtype=torch.float64),
        keep=torch.ones(count, dtype=torch.bool),
        forced=torch.zeros(count, dtype=torch.bool),
        version=torch.full((count,), version) if "token_versions" in wanted else None,
        old_logprobs=logprobs if "old_logprobs" in wanted else None,
        rollout_logprobs=logprobs if "rollout_logprobs" in wanted else None,
        ref_logprobs=joined([row.ref_logprobs for row in rows if row.ref_logprobs is not None])
        if "ref_logprobs" in wanted
        else None,
    )


def _numbers(plan: Sequence[PlanRow], rows: Sequence[Outline]) -> tuple[list[int], list[int]]:
    """Group of each row, and its number inside it. Rows with a label of their own form groups after those of the
    plan."""
    after = max((p.group for p in plan), default=-1) + 1
    labels: dict[Any, int] = {}
    count: dict[int, int] = {}
    group, number = [], []
    for row in rows:
        own = plan[row.plan].group
        if row.label is not None:
            own = labels.setdefault((row.plan, row.label), after + len(labels))
        group.append(own)
        number.append(count.get(own, 0))
        count[own] = number[-1] + 1
    return group, number
