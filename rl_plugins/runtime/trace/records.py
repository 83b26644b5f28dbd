"""A traced batch as records of the tables in `schema`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.errors import shortened
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.groups import Groups
from rl_plugins.core.method import RowNote, TurnNote
from rl_plugins.core.requests import ORIGIN, Kind
from rl_plugins.core.rollouts import Rollouts, Shape, weighted_reward
from rl_plugins.runtime.trace import schema
from rl_plugins.runtime.trace.batch import TracedBatch, Updated, first_advantages, shapes
from rl_plugins.runtime.trace.notes import rendered, with_names, written

FLOAT_SIGNALS = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies")
Record = dict[str, Any]


class Read:
    """A batch in the coordinates of its rows.

    Attributes:
        rollouts: all rows. raw: (rows,) weighted rewards before the hooks. grpo: (rows,) advantages of plain GRPO.
        kept: (kept rows,) numbers of the rows that `select` left.
        start: (rows + 1,) where each row's tokens begin; tokens lie row by row.
        stages: (name, (tokens,) advantages or (rows,) where they are one number per row).
        origins: of each row, `rl_plugins.core.requests.BranchOrigin` as plain data or None.
        row_of_number: (group, number of the rollout in its program) -> row.
        turn_place: (turns,) place of each turn among those of the rows that stayed, -1 of the others.
        left: (method, hook, (rows,) bool or None, (tokens,) bool or None) of what left.
    """

    def __init__(self, batch: TracedBatch) -> None:
        r, t = batch.rollouts, batch.tokens
        self.batch, self.rollouts, self.tokens = batch, r, t
        self.raw = weighted_reward(r.rewards, r.reward_weights)
        self.grpo = grpo_advantages(r.replace(reward=self.raw))
        self.kept = r.kept.nonzero()[:, 0]
        self.of_row = Groups(t.row, count=len(r))
        self.start = torch.nn.functional.pad(torch.cumsum(torch.bincount(t.row, minlength=len(r)), 0), (1, 0))
        self.trained = self.of_row.sum(t.keep.double()) > 0
        live = torch.where(t.keep, t.advantages, torch.nan)
        self.advantage = torch.nan_to_num(self.of_row.mean(live), nan=0.0)
        self.turn_place = _places_of(r)
        self.origins = r.meta.get(ORIGIN) or [None] * len(r)
        self.row_of_number = {
            (g, o["number"]): i
            for i, (g, o, index) in enumerate(zip(r.group.tolist(), self.origins, r.index.tolist(), strict=True))
            if o is not None and not index
        }
        self.stages = self._stages()
        self.left = self._left()

    def _stages(self) -> list[tuple[str, Tensor]]:
        maker = next((s.method for s in self.batch.seen if s.hook == "advantages"), "")
        found = [(f"{maker}.advantages" if maker else "host", first_advantages(self.batch))]
        return found + [(f"{name}.shape", s.advantages) for name, s in shapes(self.batch) if s.advantages is not None]

    def _left(self) -> list[tuple[str, str, Tensor, Tensor]]:
        """(method, hook, (rows,) bool, (tokens,) bool): what each hook took out that was still there."""
        r, t = self.rollouts, self.tokens
        rows, tokens = torch.ones(len(r), dtype=torch.bool), torch.ones(len(t), dtype=torch.bool)
        found = []
        for s in self.batch.seen:
            gone_rows, gone_tokens = torch.zeros_like(rows), torch.zeros_like(tokens)
            if s.hook == "select" and s.result is not None:
                gone_rows = ~torch.as_tensor(s.result).bool()
            elif s.hook == "shape" and isinstance(s.result, Shape):
                if s.result.keep_rows is not None:
                    gone_rows[self.kept] = ~torch.as_tensor(s.result.keep_rows).bool()
                if s.result.keep_tokens is not None:
                    gone_tokens = ~torch.as_tensor(s.result.keep_tokens).bool()
            gone_rows, gone_tokens = gone_rows & rows, gone_tokens & tokens
            gone_tokens = (gone_tokens | gone_rows[t.row]) & tokens
            rows, tokens = rows & ~gone_rows, tokens & ~gone_tokens
            if bool(gone_rows.any()) or bool(gone_tokens.any()):
                found.append((s.method, s.hook, gone_rows, gone_tokens))
        return found


def _places_of(rollouts: Rollouts) -> Tensor:
    if rollouts.turns is None:
        return torch.zeros(0, dtype=torch.int64)
    stay = rollouts.kept[rollouts.turns.row]
    return torch.where(stay, torch.cumsum(stay, 0) - 1, -1)


def row_records(batch: TracedBatch, decode: Callable[[Sequence[int]], str]) -> list[Record]:
    """Records of the rows of the groups that are recorded.

    Args:
        decode: token ids -> text, special tokens kept.
    """
    read = Read(batch)
    chosen = [i for i, g in enumerate(batch.rollouts.group.tolist()) if g in batch.groups]
    notes = _notes(read)
    return [_row(read, i, decode, notes.get(i, [])) for i in chosen]


def _row(read: Read, i: int, decode: Callable[[Sequence[int]], str], notes: list[Record]) -> Record:
    batch, r, t = read.batch, read.rollouts, read.tokens
    ids = r.token_ids
    assert ids is not None
    prompt, completion = ids.prompt[i].numpy(), ids.completion[i].numpy()
    places = torch.arange(int(read.start[i]), int(read.start[i + 1]))
    position = t.position[places].numpy()

    def spread(values: Tensor | None, fill: Any = np.nan, dtype: Any = np.float32) -> Any:
        """Values of the row's tokens -> one for each token of the completion."""
        if values is None or not len(places):
            return None
        full = np.full(len(completion), fill, dtype)
        full[position] = values[places].numpy()
        return full

    kinds = np.where(ids.observed[i].numpy(), int(Kind.OBSERVED), int(Kind.SAMPLED)).astype(np.int8)
    kinds[position[t.forced[places].numpy()]] = int(Kind.FORCED)
    rewarded = [(s.method, _numbers(s.result)) for s in batch.seen if s.hook == "rewards" and s.result is not None]
    planned = batch.plans.get(int(r.group[i]))
    return {
        "schema": schema.VERSION,
        "batch": r.batch,
        "row": i,
        "group": int(r.group[i]),
        "prompt_index": int(r.prompt_index[i]),
        "rollout": int(r.rollout[i]),
        "index": int(r.index[i]),
        "prompt": decode(prompt.tolist()),
        "completion": decode(completion.tolist()),
        "prompt_ids": prompt,
        "completion_ids": completion,
        "kinds": kinds,
        "origin": _origin(r, i, planned),
        "version": int(r.version[i]),
        "newest_version": int(r.newest_version[i]),
        "current_version": r.current_version,
        "versions": spread(t.version, -1, np.int32),
        "truncated": bool(r.truncated[i]),
        "length": int(r.length[i]),
        "rewards": with_names(zip(r.reward_names, r.rewards[i].tolist(), strict=True)),
        "raw_reward": float(read.raw[i]),
        "reward": float(r.reward[i]),
        "rewarded": [{"method": m, "reward": float(v[i])} for m, v in rewarded],
        "trained": bool(read.trained[i]),
        "left": _left_of(read, i, places),
        "token_left": _token_left(read, places, position, len(completion)),
        "grpo": float(read.grpo[i]),
        "advantage": float(read.advantage[i]),
        "advantages": [_stage(name, values, places, spread) for name, values in read.stages] if len(places) else [],
        **{name: spread(getattr(t, name)) for name in FLOAT_SIGNALS},
        "turns": _turns(read, i, places),
        **_origin_of(read, i, decode),
        "plan": None if planned is None else _plan(*planned),
        "notes": notes,
        **_columns(read, i, places, position, len(completion)),
    }


def _numbers(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def _origin(r: Rollouts, i: int, planned: Any) -> str:
    if planned is not None and int(r.rollout[i]) < len(planned[0].given):
        return "given"
    return "carried" if int(r.version[i]) < int(r.newest_version[i]) else "generated"


def _stage(name: str, values: Tensor, places: Tensor, spread: Callable[[Tensor], Any]) -> Record:
    own = values[places]
    uniform = bool((own == own[0]).all())
    return {"stage": name, "advantage": float(own.mean()), "tokens": None if uniform else spread(values.float())}


def _left_of(read: Read, i: int, places: Tensor) -> list[Record]:
    found = []
    for method, hook, rows, tokens in read.left:
        count = int(read.rollouts.length[i]) if bool(rows[i]) else int(tokens[places].sum())
        if bool(rows[i]) or count:
            found.append({"method": method, "hook": hook, "tokens": count})
    return found


def _token_left(read: Read, places: Tensor, position: Any, length: int) -> Any:
    """Of each token, which of the row's entries of `left` took it out; None if all of them stay."""
    if not len(places) or bool(read.tokens.keep[places].all()):
        return None
    full, number = np.full(length, schema.STAYS, np.int8), 0
    for _, _, _, tokens in read.left:
        gone = tokens[places].numpy()
        if gone.any():
            full[position[gone]] = number
            number += 1
    return full


def _turns(read: Read, i: int, places: Tensor) -> list[Record] | None:
    table, turn = read.rollouts.turns, read.tokens.turn
    if table is None:
        return None
    found = []
    for number in (table.row == i).nonzero()[:, 0].tolist():
        own = read.tokens.position[places][turn[places] == number] if turn is not None else places[:0]
        found.append(
            {
                "turn": int(table.turn[number]),
                "start": int(own.min()) if len(own) else None,
                "stop": int(own.max()) + 1 if len(own) else None,
                "anchor": None if table.anchor[number] is None else _text(table.anchor[number]),
                "reward": float(table.reward[number]),
                "valid": bool(table.valid[number]),
                "compared": _compared(read, number),
            }
        )
    return found


def _origin_of(read: Read, i: int, decode: Callable[[Sequence[int]], str]) -> Record:
    """Where the row of a tree comes from, as its program noted it."""
    origin = read.origins[i]
    if origin is None:
        return {"branch": None, "pruned": None}
    parent = read.row_of_number.get((int(read.rollouts.group[i]), origin["parent"]))
    pruned = [
        {
            "start": p["start"],
            "ids": list(p["tokens"]),
            "text": decode(list(p["tokens"])),
            "score": p["score"],
            "why": written(p["why"]),
        }
        for p in origin["pruned"]
    ]
    branch = {"parent": parent, "start": origin["start"], "score": origin["score"], "why": written(origin["why"])}
    return {"branch": branch, "pruned": pruned}


def _compared(read: Read, number: int) -> list[Record]:
    """What a method said with `note_turns` of a turn; it knows the turns of the rows that stayed."""
    place = int(read.turn_place[number])
    notes = [n for s in read.batch.seen for n in s.notes if isinstance(n, TurnNote)] if place >= 0 else []
    return [
        {
            "method": n.method,
            "name": n.name,
            "set": int(n.compared[place]),
            "size": int(n.size[place]),
            "advantage": float(n.advantage[place]),
        }
        for n in notes
        if int(n.compared[place]) >= 0
    ]


def _text(value: Any) -> str:
    return written(shortened(value if isinstance(value, str) else json.dumps(value, default=str), 2000))


def _plan(row: Any, by: tuple[str, ...]) -> Record:
    return {
        "by": list(by),
        "n": row.n,
        "spare": row.spare,
        "given": len(row.given),
        "prefix": len(row.prefix),
        "edited": sorted(row.edit or ()),
        "max_tokens": row.max_tokens,
        "max_turns": row.max_turns,
    }


def _columns(read: Read, i: int, places: Tensor, position: Any, length: int) -> Record:
    """Columns of `shape` for the loss."""
    inside = int((read.kept < i).sum())
    kept, row, token = bool(read.rollouts.kept[i]), [], []
    for _, shaped in shapes(read.batch):
        row += [(name, float(_numbers(v)[inside])) for name, v in shaped.row_columns.items() if kept]
        for name, values in shaped.token_columns.items():
            full = np.full(length, np.nan, np.float32)
            full[position] = torch.as_tensor(values)[places].float().numpy()
            token.append({"name": name, "values": full})
    return {"row_columns": with_names(row), "token_columns": token}


def _notes(read: Read) -> Mapping[int, list[Record]]:
    """Row -> what methods noted of it. Between `select` and `observe` a hook knows the rows that stayed by their place
    among them."""
    found: dict[int, list[Record]] = {}
    for s in read.batch.seen:
        here = torch.arange(len(read.rollouts)) if s.hook in ("rewards", "select", "observe") else read.kept
        for note in s.notes:
            if isinstance(note, RowNote):
                for number, said in rendered(note, len(here)):
                    found.setdefault(int(here[number]), []).append({"method": note.method, "hook": s.hook, **said})
    return found


def update_records(batch: int, updates: Sequence[Updated]) -> list[Record]:
    """Records of the optimizer steps of a batch."""
    return [
        {
            "schema": schema.VERSION,
            "batch": batch,
            "update": number,
            "lr_scale": float(np.prod(list(u.scaled.values()))),
            "scaled": [{"method": m, "lr_scale": v} for m, v in u.scaled.items()],
            "ratios": [
                {
                    "row": r.row,
                    "ratio": r.ratio.numpy(),
                    "clipped": None if r.clipped is None else r.clipped.numpy().astype(np.int8),
                }
                for r in u.ratios
            ]
            or None,
        }
        for number, u in enumerate(updates)
    ]


def batch_record(batch: TracedBatch, now: float, host: str, methods: Sequence[str]) -> Record:
    """The record of a batch, with a summary of all its groups."""
    read, r, t = Read(batch), batch.rollouts, batch.tokens
    groups = r.groups
    first = groups.min(torch.arange(len(r)).double()).long()
    change = torch.where(read.trained, (read.advantage - read.grpo).abs(), torch.nan)
    filled = {
        "prompt_index": r.prompt_index[first],
        "rows": groups.size,
        "trained": groups.sum(read.trained.double()).long(),
        "reward": groups.mean(read.raw),
        "spread": groups.max(read.raw) - groups.min(read.raw),
        "change": groups.max(change),
        "truncated": groups.sum(r.truncated.double()).long(),
        "age": groups.max(r.staleness.double()).long(),
    }
    columns = {name: values.tolist() for name, values in filled.items()}
    return {
        "schema": schema.VERSION,
        "batch": r.batch,
        "time": datetime.fromtimestamp(now, UTC),
        "host": host,
        "methods": list(methods),
        "rows": len(r),
        "trained_rows": int(read.trained.sum()),
        "tokens": int(r.length.sum()),
        "trained_tokens": int(t.keep.sum()),
        "current_version": r.current_version,
        "stages": [name for name, _ in read.stages],
        "selected_by": batch.selected[0],
        "selected": list(batch.selected[1]),
        "stats": with_names(batch.stats.items()),
        "prompts": list(batch.prompts),
        "groups": [
            {"group": g, "recorded": g in batch.groups, **{name: values[k] for name, values in columns.items()}}
            for k, g in enumerate(groups.ids.tolist())
        ],
    }
