"""Samples of TRL's queue as the driver sees them, and back with a decision in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.rollouts import Rollouts, TokenIds, Tokens, weighted_reward
from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.preflight import no_row_has
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.trl.generation.rows import forced
from rl_plugins.trl.generation.work import Row

OWN = "rl_plugins"
"""Key of what is ours in a row of the queue."""
GROUP, VERSION, NEWEST, SAMPLED = "_group", "_version", "_newest_version", "_rollout_logprobs"
"""Columns of ours, by names that no method's column has."""
VERSIONS = "_versions"
"""Likewise, of tokens: where given completions bring versions of their own."""
REWARD = "rewards/"  # how TRL names the rewards of each function in the metrics of a sample


@dataclass(frozen=True)
class QueueEntry:
    """A sample of the queue.

    Args:
        sample: TRL's `RolloutSample`.
        row: what TRL's dataset made of it: what is packed.
        prompt_index: its row of the dataset; -1 if that is not known.
    """

    sample: Any
    row: Mapping[str, Any]
    prompt_index: int

    @property
    def trained(self) -> Tensor:
        """(tokens of prompt and completion,) bool, those the loss is taken over; TRL skips the very first."""
        mask = torch.from_numpy(np.asarray(self.row["completion_mask"])) > 0
        return mask & (torch.arange(len(mask)) > 0)

    @property
    def planned(self) -> Row | None:
        """Its row of the plan; None: TRL's own worker made it."""
        return getattr(self.sample, "row", None)

    @property
    def start(self) -> int:
        """Tokens of the prompt."""
        if self.planned is not None:
            return int(self.sample.start)
        mask = np.asarray(self.row["completion_mask"]) > 0
        return int(mask.argmax()) if mask.any() else len(mask)


@dataclass(frozen=True)
class Now:
    """Which weights these are.

    Args:
        published: TRL's number of the newest weights, when the samples were read.
        step: optimizer steps made by then.
        batch: the optimizer step that trains the samples.
        every: optimizer steps between two publications.
    """

    published: int
    step: int
    batch: int
    every: int

    def version(self, theirs: int) -> int:
        """Published weights in our count, from 0, of weights that have TRL's number `theirs`: its count goes on
        differently after a resume."""
        return self.step // self.every - (self.published - theirs)

    @property
    def current(self) -> int:
        """The newest published weights when the samples are trained."""
        return self.batch // self.every


def seen(
    entries: Sequence[QueueEntry], stack: MethodStack, now: Now, ends: Sequence[int], host: Any
) -> tuple[Rollouts, Tokens | None]:
    """Complete groups as the driver sees them; tokens where a method reads them.

    Args:
        ends: token ids that end a completion.
        host: has `train_dataset` and `processing_class`.

    Raises:
        MethodError: a column that the dataset does not have.
    """
    needs = stack.needs_now
    masks = [e.trained for e in entries]
    starts = [e.start for e in entries]
    group = torch.tensor([_group(e) for e in entries], dtype=torch.int64)
    names = [k for k in entries[0].sample.metrics if k.startswith(REWARD)]
    rewards = torch.tensor(
        [[e.sample.metrics.get(k, float("nan")) for k in names] for e in entries], dtype=torch.float64
    ).reshape(len(entries), len(names))
    weights = torch.ones(len(names), dtype=torch.float64)
    versions = [token_versions(e, now) for e in entries]
    ids = [torch.from_numpy(np.asarray(e.row["input_ids"])).long() for e in entries]
    completions = [x[s:] for x, s in zip(ids, starts, strict=True)]
    read = [~m[s:] for m, s in zip(masks, starts, strict=True)]

    def decoded(signal: str, special: bool) -> list[str] | None:
        if signal not in needs:
            return None
        made: list[str] = host.processing_class.batch_decode(
            [c.tolist() for c in completions], skip_special_tokens=not special
        )
        return made

    rollouts = Rollouts(
        group=group,
        prompt_index=torch.tensor([e.prompt_index for e in entries], dtype=torch.int64),
        rollout=_numbers(group),
        index=torch.zeros(len(entries), dtype=torch.int64),
        rewards=rewards,
        reward_names=tuple(k.removeprefix(REWARD) for k in names),
        reward_weights=weights,
        reward=weighted_reward(rewards, weights),
        length=torch.stack([m.sum() for m in masks]),
        truncated=torch.tensor([not len(c) or int(c[-1]) not in ends for c in completions]),
        kept=torch.ones(len(entries), dtype=torch.bool),
        version=torch.stack([v.min() for v in versions]),
        newest_version=torch.stack([v.max() for v in versions]),
        current_version=now.current,
        steps_since_published=now.batch - now.current * now.every,
        token_ids=TokenIds.cat([x[:s] for x, s in zip(ids, starts, strict=True)], completions, read)
        if "token_ids" in needs
        else None,
        text=decoded("text", False),
        raw_text=decoded("raw_text", True),
        messages=[e.sample.completion for e in entries] if "messages" in needs else None,
        meta=_columns(entries, stack, host.train_dataset),
        payload=[e.planned.plan.payload if e.planned and e.planned.plan else None for e in entries],
        batch=stack.batch,
    )
    if not stack.reads_tokens:
        return rollouts, None
    row = torch.repeat_interleave(torch.arange(len(entries)), rollouts.length)
    sampled = torch.cat(
        [torch.from_numpy(np.asarray(e.row["old_log_probs"])).float()[m] for e, m in zip(entries, masks, strict=True)]
    )
    return rollouts, Tokens(
        row=row,
        position=torch.cat([m.nonzero()[:, 0] - s for m, s in zip(masks, starts, strict=True)]),
        advantages=torch.zeros(len(row), dtype=torch.float64),
        keep=torch.ones(len(row), dtype=torch.bool),
        forced=torch.cat([_forced(e, m) for e, m in zip(entries, masks, strict=True)]),
        version=torch.cat([v[:n] for v, n in zip(versions, rollouts.length.tolist(), strict=True)])
        if "token_versions" in needs
        else None,
        old_logprobs=sampled if "old_logprobs" in needs else None,
        rollout_logprobs=sampled.clone() if "rollout_logprobs" in needs else None,
    )


def token_versions(entry: QueueEntry, now: Now) -> Tensor:
    """(trained tokens,) in our count; one entry for a sample without any. A given completion may bring its own."""
    trained, made = entry.trained[entry.start :], now.version(entry.sample.model_version)
    own = entry.planned.versions if entry.planned else None
    if own is None or not bool(trained.any()):
        return torch.full((max(1, int(trained.sum())),), made)
    return torch.tensor(own)[trained]


def _forced(entry: QueueEntry, mask: Tensor) -> Tensor:
    """(trained tokens,) bool, those that were put in the policy's place."""
    own = mask[entry.start :]
    if entry.planned is None:
        return torch.zeros(int(own.sum()), dtype=torch.bool)
    return forced(entry.planned, len(own))[own]


def _group(entry: QueueEntry) -> int:
    planned = entry.planned
    return int(entry.sample.group_id if planned is None or planned.plan is None else planned.plan.group)


def _numbers(group: Tensor) -> Tensor:
    """(rows,) number of each row inside its group."""
    count: dict[int, int] = {}
    numbers = []
    for g in group.tolist():
        numbers.append(count.get(g, 0))
        count[g] = numbers[-1] + 1
    return torch.tensor(numbers, dtype=torch.int64)


def _columns(entries: Sequence[QueueEntry], stack: MethodStack, dataset: Any) -> dict[str, list[Any]]:
    names = [n.partition(":")[2] for n in sorted(stack.needs_now) if n.startswith("column:")]
    if not names:
        return {}
    known = {i: dataset[i] for i in dict.fromkeys(e.prompt_index for e in entries if e.planned is None)}
    rows = [known[e.prompt_index] if e.planned is None else e.sample.columns for e in entries]
    for name in names:
        if not any(name in row for row in rows):
            raise no_row_has(name, [m.name for m in stack.methods if f"column:{name}" in m.needs])
    return {name: [row.get(name) for row in rows] for name in names}


@dataclass(frozen=True)
class Own:
    """What is ours in a row that is packed.

    Args:
        row: columns of the sample, one number each.
        token: columns of its tokens, of prompt and completion.
        batch: of the whole optimizer step, the same in all its rows: name -> number.
        live: False: the sample left, and no token of it is trained.
    """

    row: dict[str, float]
    token: dict[str, Tensor]
    batch: dict[str, float]
    live: bool = True
    advantages: Tensor | None = field(default=None)  # of its tokens, where they differ


def with_decision(entries: Sequence[QueueEntry], decision: Decision, now: Now, size: int) -> list[dict[str, Any]]:
    """The rows to pack. Those that left are two tokens long, and none of them is trained.

    Args:
        size: rows of an optimizer step. If a plan made more, rows that left make room; if it made fewer, rows without a
            trained token fill up.
    """
    rollouts = decision.rollouts
    lengths = rollouts.length.tolist()
    split: dict[str, Sequence[Tensor]] = {
        name: torch.split(values, lengths)
        for name, values in {
            "keep": decision.keep_tokens,
            "advantages": decision.advantages,
            "old": decision.old_logprobs,
        }.items()
        if values is not None
    }
    columns: dict[str, Sequence[Tensor]] = {
        name: torch.split(values.float(), lengths) for name, values in decision.token_columns.items()
    }
    if any(e.planned is not None and e.planned.versions for e in entries):
        columns[VERSIONS] = [token_versions(e, now)[:n] for e, n in zip(entries, lengths, strict=True)]
    tokens = int(rollouts.length[decision.trained].sum())
    if decision.keep_tokens is not None:
        tokens = int(decision.keep_tokens.sum())
    numbers = {
        "num_tokens": float(tokens),
        "num_rows": float(decision.trained.sum()),
        "current_version": float(rollouts.current_version),
        "steps_since_published": float(rollouts.steps_since_published),
    }
    of_rows = {
        GROUP: rollouts.group,
        VERSION: rollouts.version,
        NEWEST: rollouts.newest_version,
        **decision.row_columns,
    }
    listed = {name: values.double().tolist() for name, values in of_rows.items()}
    trained, row_advantages = decision.trained.tolist(), decision.row_advantages.tolist()
    out, surplus = [], len(entries) - size
    for i, entry in enumerate(entries):
        if not trained[i] and surplus > 0:
            surplus -= 1
            continue
        row, mask = dict(entry.row), entry.trained
        row["metrics"] = _metrics(entry, decision, i)
        own = {name: values[i] for name, values in listed.items()}
        if not trained[i]:
            out.append(_left(row, own, numbers))
            continue

        def whole(values: Tensor, mask: Tensor = mask) -> Tensor:
            full = torch.zeros(len(mask), dtype=torch.float32)
            full[mask] = values.float()
            return full

        sampled = torch.from_numpy(np.asarray(row["old_log_probs"])).float()
        token = {name: whole(values[i]) for name, values in columns.items()} | {SAMPLED: sampled}
        advantages, row["advantage"] = None, row_advantages[i]
        if "advantages" in split:  # of tokens
            of_tokens, keep = split["advantages"][i], split["keep"][i]
            row["advantage"] = float(of_tokens[keep][0])  # not their mean, which may be rounded
            advantages = None if decision.uniform else whole(of_tokens)
        if "old" in split:
            row["old_log_probs"] = whole(split["old"][i]).numpy()
        if "keep" in split:
            row["completion_mask"] = whole(split["keep"][i]).long().numpy()
        row[OWN] = Own(own, token, numbers, advantages=advantages)
        out.append(row)
    filler = _left({**out[0], "metrics": {}}, out[0][OWN].row, numbers)
    return out + [filler] * (size - len(out))


def _left(row: Mapping[str, Any], own: dict[str, float], numbers: dict[str, float]) -> dict[str, Any]:
    return {
        **row,
        "input_ids": np.asarray(row["input_ids"])[:2],
        "completion_mask": np.zeros(2, dtype=np.int64),
        "old_log_probs": np.zeros(2, dtype=np.float32),
        "advantage": 0.0,
        OWN: Own(own, {}, numbers, live=False),
    }


def _metrics(entry: QueueEntry, decision: Decision, i: int) -> dict[str, float]:
    """Of a sample, as TRL logs them: with the rewards that were used."""
    values = dict(entry.row["metrics"])
    if decision.rewarded_by:
        values |= {f"{REWARD}{name}": float(reward[i]) for name, reward in decision.rewarded_by.items()}
        values["reward"] = float(decision.rollouts.reward[i])
        inside = decision.rollouts.groups
        values["reward_std"] = float(inside.rows(inside.std(decision.rollouts.reward, ddof=0))[i])
    return values
