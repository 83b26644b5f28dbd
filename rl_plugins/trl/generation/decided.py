"""TRL's batch after the decision: advantages, masks, columns; rows that left are cut away, moved or masked.

Keys added to the batch start with `rlp_` and survive TRL's shuffle and split: tensors with a row as first dimension, or
numbers of the whole generation batch.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.ranks import to_owners
from rl_plugins.trl.capabilities import refuse_inexact_loss, refuse_token_advantages
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
        kept_per_rank: trained rows each rank holds.
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
    kept_per_rank: list[int]


def local_decisions(decision: Decision, rows_per_rank: Sequence[int], batch_rows: int) -> list[LocalDecision]:
    """Cuts a decision into the parts of the ranks. Real rows come first in rank order, fillers are the rest; tokens lie
    row by row, so a rank's are a slice."""
    n, out, start = len(decision.trained), [], 0
    length = decision.rollouts.length
    first = torch.nn.functional.pad(torch.cumsum(length, 0), (1, 0)).tolist()  # token each row begins with
    num_tokens = int(length[decision.trained].sum())
    only_rows, keep = True, decision.keep_tokens
    if keep is not None:
        # a row that stays but for some tokens has fewer than its length; a row that left has none
        only_rows, num_tokens = int(keep.sum()) == num_tokens, int(keep.sum())
    staying = int(decision.stays.sum())
    kept = [int(part.sum()) for part in _split(decision.trained, rows_per_rank)]
    complete = only_rows and staying == n == batch_rows
    advantages = None if decision.uniform or decision.advantages is None else decision.advantages.float()
    row_advantages = decision.row_advantages.float()
    for size in rows_per_rank:
        mine = slice(min(start, n), min(start + size, n))
        here = slice(first[mine.start], first[mine.stop])

        def rows(x: Tensor, fill: float = 0, mine: slice = mine, size: int = size) -> Tensor:
            return torch.nn.functional.pad(x[mine], (0, size - (mine.stop - mine.start)), value=fill)

        def of_tokens(x: Tensor | None, here: slice = here) -> Tensor | None:
            return None if x is None else x[here]

        out.append(
            LocalDecision(
                trained=rows(decision.trained),
                row_advantages=rows(row_advantages),
                advantages=of_tokens(advantages),
                keep_tokens=None if only_rows else of_tokens(keep),
                old_logprobs=of_tokens(decision.old_logprobs),
                row_columns={k: rows(v) for k, v in decision.row_columns.items()},
                token_columns={k: v[here].float() for k, v in decision.token_columns.items()},
                group=rows(decision.rollouts.group, -1),
                num_rows=staying,
                num_tokens=num_tokens,
                complete=complete,
                kept_per_rank=kept,
            )
        )
        start += size
    return out


def _split(x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Runs of the given sizes; the last ones are shorter, or empty, where `x` ends."""
    stops = list(itertools.accumulate(sizes))
    return [x[stop - size : stop] for size, stop in zip(sizes, stops, strict=True)]


def apply_decision(trainer: Trainer, out: HostBatch, inside: Tensor, d: LocalDecision, batch_rows: int) -> HostBatch:
    """TRL's batch with a decision in it, of the size TRL expects.

    Args:
        out: the batch TRL returned.
        inside: (rows without fillers, time) bool, where their tokens are.
        batch_rows: rows the batch trains, of all ranks.
    """
    ids, device = out["completion_ids"], out["completion_ids"].device
    shape = tuple(ids.shape)

    def padded(values: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
        full = torch.zeros(shape, dtype=dtype)
        full[: inside.shape[0], : inside.shape[1]][inside] = values.to(dtype)
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
    rank = trainer.accelerator.process_index
    kept = d.trained.nonzero()[:, 0]
    rest = (~d.trained).nonzero()[:, 0]
    stay, leave = kept[:size], kept[size:]
    if "num_images" in out:  # pixels are not a row each: nothing is cut (the plan was checked), rows are masked
        return _mask_rows(out, d.trained)
    received: list[HostBatch] = []
    if max(d.kept_per_rank) > size:  # known to every rank, so all enter the exchange
        room = list(itertools.accumulate(max(0, size - k) for k in d.kept_per_rank))
        first = sum(max(0, k - size) for k in d.kept_per_rank[:rank])  # those that leave, numbered over all ranks
        moved = {first + n: _row(out, int(i)) for n, i in enumerate(leave)}
        received = list(to_owners(trainer.accelerator, moved, lambda place: bisect.bisect_right(room, place)).values())
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
