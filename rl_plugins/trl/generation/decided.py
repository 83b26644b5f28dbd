"""TRL's batch after the decision: advantages, masks, columns; rows that left are cut away, moved or masked.

Keys added to the batch start with `rlp_` and survive TRL's shuffle and split: tensors with a row as first dimension, or
numbers of the whole generation batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.ranks import to_owners
from rl_plugins.trl.capabilities import refuse_inexact_loss, refuse_token_advantages
from rl_plugins.trl.generation.rows import Inside
from rl_plugins.trl.host import ROW_COLUMN, TOKEN_COLUMN, HostBatch, Trainer


@dataclass(frozen=True)
class LocalDecision:
    """One rank's part of the decision. Its rows in order, fillers at the end; tokens of those rows, flat.

    Attributes:
        trained: (rows,) bool.
        row_advantages: (rows,) float32.
        advantages: (tokens,) float32, None if every row has one advantage.
        keep_tokens: (tokens,) bool, None if only whole rows left.
        old_logprobs: (tokens,) or None.
        row_columns, token_columns: by name.
        group: (rows,) group numbers, -1 for fillers.
        num_rows, num_tokens: those that stay, over all ranks.
        complete: no row and no token left, and the batch is as long as TRL's own.
        moves: of the rows this rank trains beyond its share, number among those of all ranks -> rank that has room.
            None: no rank has such rows.
    """

    trained: Tensor
    row_advantages: Tensor
    advantages: Tensor | None
    keep_tokens: Tensor | None
    old_logprobs: Tensor | None
    row_columns: dict[str, Tensor]
    token_columns: dict[str, Tensor]
    group: Tensor
    num_rows: int
    num_tokens: int
    complete: bool
    moves: Mapping[int, int] | None


def local_decisions(decision: Decision, rows_per_rank: Sequence[int], batch_rows: int) -> list[LocalDecision]:
    """Cuts a decision into the parts of the ranks. Real rows come first in rank order, fillers are the rest; tokens lie
    row by row, so a rank's are a slice."""
    sizes, ranks = list(rows_per_rank), len(rows_per_rank)
    n, length = len(decision.trained), decision.rollouts.length
    rank = torch.repeat_interleave(torch.tensor(sizes))[:n]
    counts = torch.bincount(rank, length.double(), ranks).long().tolist()  # tokens of each
    num_tokens = int(length[decision.trained].sum())
    only_rows, keep = True, decision.keep_tokens
    if keep is not None:
        # a row that stays but for some tokens has fewer than its length; a row that left has none
        only_rows, num_tokens = num_tokens == (found := int(torch.count_nonzero(keep))), found
    staying = int(decision.stays.sum())
    complete = only_rows and staying == n == batch_rows

    def by_rows(x: Tensor, fill: float = 0) -> Sequence[Tensor]:
        return torch.split(torch.nn.functional.pad(x, (0, sum(sizes) - n), value=fill), sizes)

    def by_tokens(x: Tensor | None) -> Sequence[Any]:
        return [None] * ranks if x is None else torch.split(x, counts)

    trained, row_advantages = by_rows(decision.trained), by_rows(decision.row_advantages.float())
    advantages = by_tokens(None if decision.uniform or decision.advantages is None else decision.advantages.float())
    keep_tokens, old_logprobs = by_tokens(None if only_rows else keep), by_tokens(decision.old_logprobs)
    row_columns = {name: by_rows(x) for name, x in decision.row_columns.items()}
    token_columns = {name: by_tokens(x.float()) for name, x in decision.token_columns.items()}
    group = by_rows(decision.rollouts.group, -1)
    moves = _moves(torch.bincount(rank[decision.trained], minlength=ranks), batch_rows // ranks)
    return [
        LocalDecision(
            trained=trained[k],
            row_advantages=row_advantages[k],
            advantages=advantages[k],
            keep_tokens=keep_tokens[k],
            old_logprobs=old_logprobs[k],
            row_columns={name: x[k] for name, x in row_columns.items()},
            token_columns={name: x[k] for name, x in token_columns.items()},
            group=group[k],
            num_rows=staying,
            num_tokens=num_tokens,
            complete=complete,
            moves=moves[k],
        )
        for k in range(ranks)
    ]


def _moves(kept: Tensor, share: int) -> Sequence[Mapping[int, int] | None]:
    """`LocalDecision.moves` of each rank.

    Args:
        kept: (ranks,) rows each of them trains.
        share: rows each can train.
    """
    if int(kept.max()) <= share:
        return [None] * len(kept)
    over, room = (kept - share).clamp(min=0), torch.cumsum((share - kept).clamp(min=0), 0)
    numbers = torch.arange(int(over.sum()))
    pairs = torch.stack([numbers, torch.searchsorted(room, numbers, right=True)], 1)
    return [dict(part.tolist()) for part in torch.split(pairs, over.tolist())]


def apply_decision(trainer: Trainer, out: HostBatch, inside: Inside, d: LocalDecision, batch_rows: int) -> HostBatch:
    """TRL's batch with a decision in it, of the size TRL expects.

    Args:
        out: the batch TRL returned.
        inside: where the tokens of the rows are, without fillers.
        batch_rows: rows the batch trains, of all ranks.
    """
    ids, device = out["completion_ids"], out["completion_ids"].device
    shape = tuple(ids.shape)

    def padded(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        full = torch.zeros(shape, dtype=dtype)
        full[: len(inside.mask), : inside.width][inside.mask] = values.to(dtype)
        return full.to(device)

    if d.advantages is not None:
        refuse_token_advantages(trainer)
    new = {"advantages": d.row_advantages.to(device) if d.advantages is None else padded(d.advantages)}
    if d.old_logprobs is not None:
        new["old_per_token_logps"] = padded(d.old_logprobs)
    new |= {ROW_COLUMN + name: values.float().to(device) for name, values in d.row_columns.items()}
    new |= {TOKEN_COLUMN + name: padded(values) for name, values in d.token_columns.items()}
    stack = trainer.methods
    if stack.claimed("before_update"):
        new["rlp_group"] = d.group.to(device)
    if d.complete and not stack.claimed("policy_loss", "regularize", "before_update"):
        return {**out, **new}
    new["rlp_num_rows"] = torch.tensor(float(d.num_rows), device=device)
    if d.complete:
        return {**out, **new}
    inexact = d.num_rows != batch_rows or (d.keep_tokens is not None and not trainer.host_loss.like)
    if inexact and d.num_rows:  # without a row there is no loss
        refuse_inexact_loss(trainer)
    if d.keep_tokens is not None:
        mask = 1 - padded(~d.keep_tokens, torch.long)
        new["tool_mask"] = out.get("tool_mask", torch.ones_like(out["completion_mask"])) * mask
    # Of the whole generation batch, like TRL's own: tokens of rows that left do not count.
    new["num_items_in_batch"] = torch.tensor(d.num_tokens, device=device)
    if trainer.seams.select_completions:
        new["keep_ratio"] = torch.tensor(d.num_rows / batch_rows, device=device)
    else:
        new["rlp_rows_left"] = torch.tensor(1.0, device=device)  # the loss rescales row means, see loss.py
    return _to_batch_size(trainer, {**out, **new}, d, batch_rows // trainer.accelerator.num_processes)


def _to_batch_size(trainer: Trainer, out: HostBatch, d: LocalDecision, size: int) -> HostBatch:
    """Every rank gets exactly its share of rows: trained ones first, those beyond a rank's share move to ranks with
    room, and what is missing is filled with rows whose mask is empty."""
    kept = d.trained.nonzero()[:, 0]
    rest = (~d.trained).nonzero()[:, 0]
    stay, leave = kept[:size], kept[size:]
    if "num_images" in out:  # pixels are not a row each: nothing is cut (the plan was checked), rows are masked
        return _mask_rows(out, d.trained)
    received: list[HostBatch] = []
    if d.moves is not None:  # on no rank, so all enter the exchange
        moved = {number: _row(out, i) for number, i in zip(d.moves, leave.tolist(), strict=True)}
        received = list(to_owners(trainer.accelerator, moved, d.moves.__getitem__).values())
    missing = size - len(stay) - len(received)
    take = torch.cat([stay, rest[:missing]])
    live = torch.cat([torch.ones(len(stay)), torch.zeros(len(take) - len(stay))]).bool()
    if len(take) == len(d.trained) and bool(live.all()):
        batch = out
    else:
        index = take.to(out["completion_ids"].device)
        batch = {k: _pick(v, index, len(d.trained)) for k, v in out.items()}
    if received:
        batch = _append(batch, received, len(take))
        live = torch.cat([live, torch.ones(len(received), dtype=torch.bool)])
    return _mask_rows(batch, live)


def _mask_rows(batch: HostBatch, live: Tensor) -> HostBatch:
    """Rows that are not live get an empty loss mask; what the model attends to stays."""
    if bool(live.all()):
        return batch
    mask = batch.get("tool_mask", torch.ones_like(batch["completion_mask"]))
    return {**batch, "tool_mask": mask * live.to(mask.device)[:, None].to(mask.dtype)}


def _pick(value: Any, index: Tensor, rows: int) -> Any:
    """A trainer of somebody's own may put lists into the batch."""
    if isinstance(value, Tensor) and value.ndim and len(value) == rows:
        return value[index]
    if isinstance(value, list) and len(value) == rows:
        return [value[i] for i in index.tolist()]
    return value


def _row(out: HostBatch, i: int) -> HostBatch:
    return {k: v[i].cpu() for k, v in out.items() if isinstance(v, Tensor) and v.ndim}


def _append(batch: HostBatch, rows: list[HostBatch], held: int) -> HostBatch:
    """Rows of other ranks, padded like this rank's (prompts on the left, everything else on the right)."""
    result = dict(batch)
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.ndim}
    names = {k for k, v in tensors.items() if len(v) == held} | {k for row in rows for k in row}
    for name in names:
        own = batch.get(name)
        if own is None:  # a mask that only the sender needed
            own = torch.ones_like(batch["completion_mask"])
        theirs = [row.get(name, torch.ones_like(row["completion_mask"])).to(own.device) for row in rows]
        result[name] = _stack([*own.unbind(0), *theirs], left=name.startswith("prompt_"))
    return result


def _stack(rows: list[Tensor], left: bool) -> Tensor:
    if rows[0].ndim == 0:
        return torch.stack(rows)
    width = max(len(r) for r in rows)
    pads = [(width - len(r), 0) if left else (0, width - len(r)) for r in rows]
    return torch.stack([torch.nn.functional.pad(r, p) for r, p in zip(rows, pads, strict=True)])
