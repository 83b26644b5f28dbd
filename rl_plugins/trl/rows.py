"""Rows of TRL as the driver sees them: each rank collects its own, unpadded, and the driver puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_plugins.requests import Kind, Trajectory, Turn
from rl_plugins.rollouts import Rollouts, Tokens, weighted_reward
from rl_plugins.runtime.preflight import no_row_has
from rl_plugins.runtime.turn_table import spans, with_turns
from rl_plugins.trl.programs import host_turns

T = TypeVar("T")

# Signal -> key of TRL's batch.
_COLUMN_KEYS = {
    "old_logprobs": "old_per_token_logps",
    "rollout_logprobs": "rlp_rollout_logprobs",
    "ref_logprobs": "ref_per_token_logps",
    "entropies": "rlp_entropies",
}


def collect(step: Any, host_advantages: Tensor, out: dict[str, Any] | None) -> dict[str, Any]:
    """This rank's rows without fillers, unpadded."""
    t, needs = step.trainer, step.stack.needs
    assert step.generated is not None
    _, ids, tool_mask, completions, *_ = step.generated
    real = [i for i, r in enumerate(step.mine) if r.plan is not None]
    ends = {*t.eos_token_ids, t._tokenizer.pad_token_id}
    truncated = torch.tensor([not ids[i] or ids[i][-1] not in ends for i in real], dtype=torch.bool)
    length = torch.tensor([len(ids[i]) for i in real], dtype=torch.int64)
    place = torch.arange(max((len(c) for c in ids), default=0))
    inside = place < length[:, None]  # (rows, time), tokens that may carry a gradient
    if tool_mask is not None:
        masks = [torch.tensor(tool_mask[i], dtype=torch.bool) for i in real]
        inside &= torch.nn.utils.rnn.pad_sequence([place < 0, *masks], batch_first=True)[1:]
    if t.mask_truncated_completions:
        inside &= ~truncated[:, None]
    elif step.programs:
        truncated = torch.tensor([_trajectory(step, i).finish in ("length", "abort") for i in real])
    row, position = inside.nonzero(as_tuple=True)
    kinds = [_forced(step.mine[i], len(ids[i])) for i in real]
    forced = torch.nn.utils.rnn.pad_sequence([place < 0, *kinds], batch_first=True)[1:]
    part: dict[str, Any] = {
        "length": inside.sum(1),
        "completion_length": length,
        "truncated": truncated,
        "position": position,
        "forced": forced[row, position],
        "advantages": host_advantages.detach().cpu()[real],
    }
    for name in step.columns_wanted:
        assert out is not None
        part[name] = out[_COLUMN_KEYS[name]].detach().cpu()[real][:, : len(place)][inside]
    if step.programs:
        part["version"] = _versions(step, real, inside)
        part["meta"] = [dict(_trajectory(step, i).meta) for i in real]
    if "turns" in needs:
        part["turns"] = _turns(step, real, tool_mask, ids)
    if "text" in needs:
        part["text"] = t.processing_class.batch_decode([ids[i] for i in real], skip_special_tokens=True)
    if "raw_text" in needs:
        part["raw_text"] = t.processing_class.batch_decode([ids[i] for i in real], skip_special_tokens=False)
    if "messages" in needs:
        part["messages"] = [completions[i] for i in real]
    return part


def _forced(row: Any, length: int) -> Tensor:
    """Which tokens were put in the policy's place: of a given completion, of a prefix, by a program."""
    assert row.plan is not None
    if row.made is not None:
        return torch.tensor([k == Kind.FORCED for k in row.made.trajectory.kinds] or [False])
    first = length if row.number < len(row.plan.given) else len(row.plan.prefix)
    return torch.arange(length) < first


def _versions(step: Any, real: list[int], inside: Tensor) -> Tensor:
    """(tokens,) optimizer step of the policy that made each token; of tokens no policy made, this one."""
    now = step.trainer.state.global_step
    versions = torch.full(inside.shape, now, dtype=torch.int64)
    for k, i in enumerate(real):
        own = torch.tensor(_trajectory(step, i).versions, dtype=torch.int64)
        versions[k, : len(own)] = torch.where(own < 0, now, own)
    return versions[inside]


def _trajectory(step: Any, i: int) -> Trajectory:
    made = step.mine[i].made
    assert made is not None
    return made.trajectory


def _turns(step: Any, real: list[int], tool_mask: Any, ids: list[list[int]]) -> list[tuple[Turn, ...]]:
    """Turns of this rank's rows: as the program marked them, or as tools and environments of TRL tell them."""
    if not step.programs:
        return host_turns(step.trainer, real, tool_mask, ids)
    marked = [_trajectory(step, i) for i in real]
    return [row.turns or spans(row.trained) for row in marked]


def rollouts_of(step: Any, parts: list[dict[str, Any]]) -> tuple[Rollouts, Tokens, Tensor]:
    """All ranks' rows as the driver sees them, in the order of the plan."""
    t = step.trainer
    rows = [r for r in flat(step.rows) if r.plan is not None]
    plans = [r.plan for r in rows if r.plan is not None]
    assert step.rewards is not None

    def cat(name: str) -> Tensor:
        return torch.cat([p[name] for p in parts])

    def listed(name: str) -> list[Any] | None:
        return [x for p in parts for x in p[name]] if name in parts[0] else None

    length = cat("length")
    rewards = step.rewards.detach().double().cpu()
    rewards = rewards[torch.tensor([r.plan is not None for r in flat(step.rows)])]
    weights = t.reward_weights.double().cpu()
    wanted = [n.removeprefix("column:") for n in step.stack.needs if n.startswith("column:")]
    meta: dict[str, list[Any]] = {}
    if wanted:  # reading a row may decode an image
        own = listed("meta") or [{}] * len(rows)
        columns = [{**step.prompts.row(p), **m} for p, m in zip(plans, own, strict=True)]
        for c in wanted:
            if rows and not any(c in x for x in columns):
                raise no_row_has(c, [m.name for m in step.stack.methods if f"column:{c}" in m.needs])
        meta = {c: [x.get(c) for x in columns] for c in wanted}
    made = [r.made for r in rows if r.made is not None]
    group = [m.group for m in made] if made else [p.group for p in plans]
    rollouts = Rollouts(
        group=torch.tensor(group, dtype=torch.int64),
        prompt_index=torch.tensor([p.prompt_index if step.prompts.numbered else -1 for p in plans], dtype=torch.int64),
        rollout=torch.tensor([m.rollout for m in made] if made else _numbers(group), dtype=torch.int64),
        index=torch.tensor([m.index for m in made] if made else [0] * len(rows), dtype=torch.int64),
        rewards=rewards,
        reward_names=tuple(t.reward_func_names),
        reward_weights=weights,
        reward=weighted_reward(rewards, weights),
        length=length,
        truncated=cat("truncated"),
        kept=torch.ones(len(rows), dtype=torch.bool),
        version=torch.full((len(rows),), t.state.global_step, dtype=torch.int64),  # the oldest is filled in below
        text=listed("text"),
        raw_text=listed("raw_text"),
        messages=listed("messages"),
        meta=meta,
        payload=step.payload,
        batch=step.stack.batch,
    )
    row = torch.repeat_interleave(torch.arange(len(rows)), length)
    advantages = cat("advantages")
    tokens = Tokens(
        row=row,
        position=cat("position"),
        advantages=torch.zeros(len(row), dtype=torch.float64),
        keep=torch.ones(len(row), dtype=torch.bool),
        forced=cat("forced"),
        **{name: cat(name) for name in step.columns_wanted},
    )
    step.completion_length = cat("completion_length")
    if step.programs:
        version = cat("version")
        oldest = rollouts.version.scatter_reduce(0, row, version, "amin") if len(row) else rollouts.version
        rollouts, tokens = rollouts.replace(version=oldest), tokens.replace(version=version)
    turns = listed("turns")
    if turns is not None:
        rollouts, tokens = with_turns(rollouts, tokens, turns)
    return rollouts, tokens, advantages


def flat(parts: Sequence[Sequence[T]]) -> list[T]:
    """The rows of all ranks in rank order."""
    return [x for part in parts for x in part]


def _numbers(ids: Sequence[int]) -> list[int]:
    """How many earlier entries each entry equals: a rollout's number inside its group."""
    seen: dict[int, int] = {}
    out = []
    for i in ids:
        out.append(seen.get(i, 0))
        seen[i] = out[-1] + 1
    return out
