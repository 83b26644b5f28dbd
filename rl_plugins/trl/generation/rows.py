"""Rows of a batch: as each rank collects them from TRL, and as the driver sees them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.groups import places, spread
from rl_plugins.core.requests import ORIGIN, Kind
from rl_plugins.core.rollouts import Jagged, Rollouts, TokenIds, Tokens, weighted_reward
from rl_plugins.runtime.preflight import no_row_has
from rl_plugins.runtime.turn_table import FlatTurns, spans, token_turns, turn_table
from rl_plugins.trl.generation.programs import host_turns
from rl_plugins.trl.generation.work import Row, ScoredWork, Work, flat
from rl_plugins.trl.host import HostRows, Trainer, tokenizer_of

T = TypeVar("T")


class Inside:
    """Where the tokens of one rank's rows are that may carry a gradient.

    Args:
        length: (rows,) how many. width: of the longest completion.
        mask: (rows, time) bool; None: they are the first of each row. It is made where somebody asks for it.
    """

    def __init__(self, length: Tensor, width: int, mask: Tensor | None = None) -> None:
        self.length, self.width, self.whole = length, width, mask is None
        if mask is not None:
            self.mask = mask

    @cached_property
    def mask(self) -> Tensor:
        return torch.arange(self.width) < self.length[:, None]


@dataclass(frozen=True)
class LocalTokens:
    """Tokens of one rank's rows, row by row; what the lengths of the rows say is left out.

    Args:
        position: (tokens,) int32; None: they are the first of each row.
        forced: (tokens,) bool; None: none is.
        version: (tokens,) published weights that made each; None: the present ones made all of them.
        columns: signal -> (tokens,).
    """

    position: Tensor | None
    forced: Tensor | None
    version: Tensor | None
    columns: Mapping[str, Tensor]


@dataclass(frozen=True)
class LocalIds:
    """Token ids of one rank's rows, row by row: prompts (tokens,) int32, their lengths (rows,), whole completions
    (tokens,) int32 and which of their tokens were only read, (tokens,) bool; None: none was."""

    prompt: Tensor
    prompt_length: Tensor
    completion: Tensor
    observed: Tensor | None

    @classmethod
    def of(cls, made: HostRows, real: Sequence[int]) -> LocalIds:
        """Of the rows that are no fillers."""
        prompts = [made.prompts[i] for i in real]
        observed = None
        if made.tool_mask is not None:
            observed = ~_flat([made.tool_mask[i] for i in real], torch.bool)
        return cls(
            prompt=_flat(prompts, torch.int32),
            prompt_length=torch.tensor([len(p) for p in prompts], dtype=torch.int64),
            completion=_flat([made.ids[i] for i in real], torch.int32),
            observed=observed,
        )


def _flat(rows: Sequence[Sequence[int]], dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.fromiter(itertools.chain.from_iterable(rows), np.int64)).to(dtype)


@dataclass(frozen=True)
class LocalRows:
    """One rank's rows without fillers, unpadded: what the driver gets. Tokens are those that may carry a gradient.

    Args:
        length: (rows,) tokens. completion_length: with those that were read.
        truncated: (rows,). advantages: (rows,) TRL's own. version, newest_version: (rows,) of its tokens.
        tokens: of these rows, where somebody reads them.
        ids: prompts and completions with what was read, where somebody reads them.
        turns, steps: turns of these rows and rewards of their steps.
        meta, text, raw_text, messages: of each row, where somebody needs them.
    """

    length: Tensor
    completion_length: Tensor
    truncated: Tensor
    advantages: Tensor
    version: Tensor
    newest_version: Tensor
    tokens: LocalTokens | None = None
    ids: LocalIds | None = None
    meta: list[dict[str, Any]] | None = None
    turns: FlatTurns | None = None
    steps: Jagged | None = None
    text: list[str] | None = None
    raw_text: list[str] | None = None
    messages: list[Any] | None = None


@dataclass(frozen=True)
class AllRows:
    """What the driver decides on. tokens: where somebody reads them. completion_length: (rows,) with tokens that were
    read. advantages: (rows,) TRL's."""

    rollouts: Rollouts
    tokens: Tokens | None
    advantages: Tensor
    completion_length: Tensor


def collect(
    trainer: Trainer, scored: ScoredWork, advantages: Tensor, columns: Mapping[str, Tensor]
) -> tuple[LocalRows, Inside, Tensor | None]:
    """This rank's rows; where their tokens are; (rows, time) versions, if they differ.

    Args:
        advantages: (rows,) TRL's own.
        columns: signal -> (rows, time).
    """
    rows, made = scored.work.mine, scored.rows
    needs, ids = trainer.methods.needs_now, made.ids
    real = [i for i, r in enumerate(rows) if r.plan is not None]
    ends = {*trainer.eos_token_ids, tokenizer_of(trainer).pad_token_id}
    truncated = torch.tensor([not ids[i] or ids[i][-1] not in ends for i in real], dtype=torch.bool)
    length = torch.tensor([len(ids[i]) for i in real], dtype=torch.int64)
    width = max((len(c) for c in ids), default=0)
    inside = Inside(torch.where(truncated, 0, length) if trainer.mask_truncated_completions else length, width)
    if made.tool_mask is not None:
        masks = [torch.tensor(m, dtype=torch.bool) for m in ([0] * width, *(made.tool_mask[i] for i in real))]
        mask = inside.mask & torch.nn.utils.rnn.pad_sequence(masks, batch_first=True)[1:]
        inside = Inside(mask.sum(1), width, mask)
    programs, now = trainer.methods.claimed("rollout", "admit"), trainer.state.global_step
    trajectories = [r.made.trajectory for r in rows if r.made is not None]
    if programs and not trainer.mask_truncated_completions:
        truncated = torch.tensor([t.finish in ("length", "abort") for t in trajectories], dtype=torch.bool)
    known = [rows[i].versions for i in real]
    versions = _versions(known, width, now) if any(known) else None
    tokens = turns = None
    if trainer.methods.reads_tokens:
        tokens = LocalTokens(
            position=None if inside.whole else inside.mask.nonzero()[:, 1].int(),
            forced=_forced_tokens([rows[i] for i in real], length, inside),
            version=None if versions is None else versions[inside.mask],
            columns={name: c.detach().cpu()[real][:, :width][inside.mask] for name, c in columns.items()},
        )
    if "turns" in needs:  # as the program marked them, or as tools and environments of TRL tell them
        marked = [tuple(t.turns) or spans(t.trained) for t in trajectories]
        turns = FlatTurns.of(marked if programs else host_turns(trainer, real, made.tool_mask, ids))

    def decoded(signal: str, special: bool) -> list[str] | None:
        if signal not in needs:
            return None
        texts: list[str] = trainer.processing_class.batch_decode(
            [ids[i] for i in real], skip_special_tokens=not special
        )
        return texts

    local = LocalRows(
        length=inside.length,
        completion_length=length,
        truncated=truncated,
        advantages=advantages.detach().cpu()[real],
        version=_extreme("amin", versions, inside, now),
        newest_version=_extreme("amax", versions, inside, now),
        tokens=tokens,
        ids=LocalIds.of(made, real) if "token_ids" in needs else None,
        meta=[t.columns for t in trajectories] if programs else None,
        turns=turns,
        steps=None if scored.step_rewards is None else scored.step_rewards.take(torch.tensor(real)),
        text=decoded("text", False),
        raw_text=decoded("raw_text", True),
        messages=[made.completions[i] for i in real] if "messages" in needs else None,
    )
    return local, inside, versions


def _forced_tokens(rows: Sequence[Row], length: Tensor, inside: Inside) -> Tensor | None:
    """(tokens,) bool; None if no row has such tokens."""
    if not any(r.made is not None or r.plan is None or r.plan.given or r.plan.prefix for r in rows):
        return None
    found = torch.zeros(inside.mask.shape, dtype=torch.bool)
    for k, (row, n) in enumerate(zip(rows, length.tolist(), strict=True)):
        own = forced(row, n)
        found[k, : len(own)] = own
    return found[inside.mask]


def _extreme(which: Literal["amin", "amax"], versions: Tensor | None, inside: Inside, now: int) -> Tensor:
    """(rows,) the oldest or newest version of each row's tokens; the present one of rows without a token."""
    if versions is None or not inside.width:
        return torch.full((len(inside.length),), now, dtype=torch.int64)
    other = now if which == "amin" else -1  # no version is newer than now
    found: Tensor = getattr(torch.where(inside.mask, versions, other), which)(1)
    return torch.where(inside.length > 0, found, now)


def forced(row: Row, length: int) -> Tensor:
    """(tokens,) bool, those put in the policy's place: of a given completion, of a prefix, by a program."""
    assert row.plan is not None
    if row.made is not None:
        return torch.from_numpy(np.array(row.made.trajectory.kinds, np.int8) == int(Kind.FORCED))
    if row.number < len(row.plan.given):
        sampled = row.plan.given[row.number].logprobs is not None
        return torch.full((length,), not sampled)
    return torch.arange(length) < len(row.plan.prefix)


def _versions(known: Sequence[Sequence[int] | None], width: int, now: int) -> Tensor:
    """(rows, time) published weights that made each token; of tokens no policy made, the present ones."""
    versions = torch.full((len(known), width), now, dtype=torch.int64)
    for k, of_row in enumerate(known):
        if of_row is not None:
            own = torch.from_numpy(np.array(of_row, np.int64))  # not entry by entry, as torch reads a sequence
            versions[k, : len(own)] = torch.where(own < 0, now, own)
    return versions


def rollouts_of(trainer: Trainer, work: Work, rewards: Tensor, parts: Sequence[LocalRows]) -> AllRows:
    """All ranks' rows as the driver sees them, in the order of the plan.

    Args:
        rewards: (rows of all ranks, functions), with fillers.
        parts: of all ranks.
    """
    stack, now = trainer.methods, trainer.state.global_step
    rows = [r for r in work.flat if r.plan is not None]
    plans = [r.plan for r in rows if r.plan is not None]
    meta = _listed([p.meta for p in parts]) or [{}] * len(rows)
    length = torch.cat([p.length for p in parts])
    rewards = rewards.detach().double().cpu()[torch.tensor([r.plan is not None for r in work.flat], dtype=torch.bool)]
    weights = trainer.reward_weights.double().cpu()
    made = [r.made for r in rows if r.made is not None]
    group = [m.group for m in made] if made else [p.group for p in plans]
    rollouts = Rollouts(
        group=torch.tensor(group, dtype=torch.int64),
        prompt_index=torch.tensor([p.prompt_index if work.prompts.numbered else -1 for p in plans], dtype=torch.int64),
        rollout=torch.tensor([m.rollout for m in made] if made else _numbers(group), dtype=torch.int64),
        index=torch.tensor([m.index for m in made] if made else [0] * len(rows), dtype=torch.int64),
        rewards=rewards,
        reward_names=tuple(trainer.reward_func_names),
        reward_weights=weights,
        reward=weighted_reward(rewards, weights),
        length=length,
        truncated=torch.cat([p.truncated for p in parts]),
        kept=torch.ones(len(rows), dtype=torch.bool),
        version=torch.cat([p.version for p in parts]),
        newest_version=torch.cat([p.newest_version for p in parts]),
        current_version=now,
        token_ids=_token_ids_of(parts),
        step_rewards=_steps_of(parts),
        text=_listed([p.text for p in parts]),
        raw_text=_listed([p.raw_text for p in parts]),
        messages=_listed([p.messages for p in parts]),
        meta=_columns_of(trainer, [{**work.prompts.row(p), **m} for p, m in zip(plans, meta, strict=True)])
        if any(n.startswith("column:") for n in stack.needs_now)  # reading a row may decode an image
        else {},
        payload=work.payload,
        batch=stack.batch,
    )
    tokens = _tokens_of([p.length for p in parts], [p.tokens for p in parts if p.tokens is not None], now)
    if tokens is not None and "token_versions" in stack.needs_now and tokens.version is None:
        tokens = tokens.replace(version=torch.full((len(tokens),), now))
    of_turns = [p.turns for p in parts if p.turns is not None]
    if of_turns:
        turns = FlatTurns.cat(of_turns)
        rollouts = rollouts.replace(turns=turn_table(rollouts, turns))
        if tokens is not None:
            tokens = tokens.replace(turn=token_turns(tokens.row, tokens.position, turns))
    advantages = torch.cat([p.advantages for p in parts])
    return AllRows(rollouts, tokens, advantages, torch.cat([p.completion_length for p in parts]))


def _token_ids_of(parts: Sequence[LocalRows]) -> TokenIds | None:
    """Token ids of all rows, if somebody reads them."""
    each = [p.ids for p in parts if p.ids is not None]
    if not each:
        return None
    length = torch.cat([p.completion_length for p in parts])
    completion = Jagged.of(torch.cat([i.completion for i in each]).long(), length)
    read = [torch.zeros(len(i.completion), dtype=torch.bool) if i.observed is None else i.observed for i in each]
    return TokenIds(
        prompt=Jagged.of(torch.cat([i.prompt for i in each]).long(), torch.cat([i.prompt_length for i in each])),
        completion=completion,
        observed=Jagged(torch.cat(read), completion.offsets),
    )


def _steps_of(parts: Sequence[LocalRows]) -> Jagged | None:
    """Rewards of the steps of all rows, if somebody reads them."""
    each = [p.steps for p in parts if p.steps is not None]
    return Jagged.of(torch.cat([s.values for s in each]), torch.cat([s.length for s in each])) if each else None


def _tokens_of(lengths: Sequence[Tensor], parts: Sequence[LocalTokens], now: int) -> Tokens | None:
    """All ranks' tokens, row by row.

    Args:
        lengths: (rows,) of each rank.
        parts: of each rank; empty if nobody reads tokens.
        now: the present version.
    """
    if not parts:
        return None
    length = torch.cat(list(lengths))
    row = spread(torch.arange(len(length)), length)
    counts = [int(n.sum()) for n in lengths]

    def joined(given: Sequence[Tensor | None], missing: Callable[[int], Tensor]) -> Tensor | None:
        if all(x is None for x in given):
            return None
        return torch.cat([missing(k) if x is None else x for k, x in enumerate(given)])

    position = joined([p.position for p in parts], lambda k: places(lengths[k]).int())
    forced = joined([p.forced for p in parts], lambda k: torch.zeros(counts[k], dtype=torch.bool))
    return Tokens(
        row=row,
        position=places(length) if position is None else position.long(),
        advantages=torch.zeros(1, dtype=torch.float64).expand(len(row)),  # there are none yet
        keep=torch.ones(len(row), dtype=torch.bool),
        forced=torch.zeros(len(row), dtype=torch.bool) if forced is None else forced,
        version=joined([p.version for p in parts], lambda k: torch.full((counts[k],), now)),
        **{name: torch.cat([p.columns[name] for p in parts]) for name in parts[0].columns},
    )


def _listed(parts: Sequence[list[T] | None]) -> list[T] | None:
    given = [p for p in parts if p is not None]
    return flat(given) if given else None


def _columns_of(trainer: Trainer, rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """The columns methods ask for, of the dataset and of programs."""
    stack, found = trainer.methods, {}
    for signal in stack.needs_now:
        kind, _, name = signal.partition(":")
        if kind == "column":
            if rows and not any(name in row for row in rows) and name != ORIGIN:
                raise no_row_has(name, [m.name for m in stack.methods if signal in m.needs])
            found[name] = [row.get(name) for row in rows]
    return found


def _numbers(ids: Sequence[int]) -> list[int]:
    """How many earlier entries each entry equals: a rollout's number inside its group."""
    seen: dict[int, int] = {}
    out = []
    for i in ids:
        out.append(seen.get(i, 0))
        seen[i] = out[-1] + 1
    return out
