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
from rl_plugins.core.estimators import GRPO_EPS, grpo_advantages
from rl_plugins.core.groups import Groups, count_true
from rl_plugins.core.method import RowNote, TurnNote
from rl_plugins.core.requests import ORIGIN, Kind
from rl_plugins.core.rollouts import Jagged, Rollouts, Shape, TokenIds, weighted_reward
from rl_plugins.runtime.trace import schema
from rl_plugins.runtime.trace.batch import TracedBatch, Updated, first_advantages, shaped_advantages, shapes
from rl_plugins.runtime.trace.notes import rendered, with_names, written

FLOAT_SIGNALS = ("old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies")
PER_ROW = ("group", "prompt_index", "rollout", "index", "version", "newest_version", "truncated", "length")
Record = dict[str, Any]


class Read:
    """A batch in the coordinates of its rows.

    Attributes:
        rollouts: all rows. raw: (rows,) weighted rewards before the hooks. grpo: (rows,) advantages of plain GRPO,
            with what the host adds to the deviation.
        kept: (kept rows,) numbers of the rows that `select` left.
        start: where each row's tokens begin, and their number; tokens lie row by row. position: (tokens,) array.
        place: of each row, its place among those that `select` left.
        rows: name -> values of all rows.
        prompt, completion, kinds: row -> array, of its tokens and of what each token of the completion is.
        rewarded: (method, reward of each row) of every `rewards` hook that gave some.
        stages: (name, (tokens,) advantages, their mean of each row, of each row whether its tokens have the same).
        origins: of each row, `rl_plugins.core.requests.BranchOrigin` as plain data or None.
        row_of_number: (group, number of the rollout in its program) -> row.
        turns: row -> its turns. turn_place: of each turn, its place among those of the rows that stayed, else -1.
        left: (method, hook, of each row whether it left, (tokens,) bool array). left_tokens: of each, tokens of every
            row.
        row_columns, token_columns: (name, values) of `shape`, of the rows and tokens that `select` left.
    """

    def __init__(self, batch: TracedBatch, host: str) -> None:
        r, t = batch.rollouts, batch.tokens
        self.batch, self.rollouts, self.tokens = batch, r, t
        self.raw = weighted_reward(r.rewards, r.reward_weights)
        self.grpo = grpo_advantages(r.replace(reward=self.raw), eps=GRPO_EPS.get(host, GRPO_EPS["trl"]))
        self.kept = r.kept.nonzero()[:, 0]
        self.of_row = Groups(t.row, count=len(r))
        self.start: list[int] = torch.cumsum(torch.bincount(t.row, minlength=len(r)), 0).tolist()
        self.start.insert(0, 0)
        self.position = t.position.numpy()
        self.place: list[int] = (torch.cumsum(r.kept, 0) - 1).tolist()
        self.trained = self.of_row.sum(t.keep.double()) > 0
        live = torch.where(t.keep, t.advantages, torch.nan)
        self.advantage = torch.nan_to_num(self.of_row.mean(live), nan=0.0)
        self.turn_place: list[int] = _places_of(r).tolist()
        self.turns: dict[int, list[int]] = {}
        for number, row in enumerate(r.turns.row.tolist() if r.turns is not None else ()):
            self.turns.setdefault(row, []).append(number)
        self.origins = r.meta.get(ORIGIN) or [None] * len(r)
        self.row_of_number = {
            (g, o["number"]): i
            for i, (g, o, index) in enumerate(zip(r.group.tolist(), self.origins, r.index.tolist(), strict=True))
            if o is not None and not index
        }
        self.stages = self._stages()
        self.left = self._left()
        self.left_tokens = [count_true(torch.from_numpy(gone), self.of_row.size).tolist() for *_, gone in self.left]
        self.whole: list[bool] = (torch.bincount(t.row[~t.keep], minlength=len(r)) == 0).tolist()
        self.rewarded = [
            (s.method, _numbers(s.result).tolist()) for s in batch.seen if s.hook == "rewards" and s.result is not None
        ]
        self.row_columns = [(n, _numbers(v).tolist()) for _, s in shapes(batch) for n, v in s.row_columns.items()]
        self.token_columns = [
            (n, torch.as_tensor(v).float().numpy()) for _, s in shapes(batch) for n, v in s.token_columns.items()
        ]
        ids = r.token_ids
        assert ids is not None
        self.prompt, self.completion = _arrays(ids.prompt), _arrays(ids.completion)
        self.kinds = _arrays(Jagged(self._kinds(ids), ids.completion.offsets))
        self.rows = {name: getattr(r, name).tolist() for name in (*PER_ROW, "rewards", "reward")}
        self.rows |= {name: getattr(self, name).tolist() for name in ("raw", "grpo", "advantage", "trained")}

    def _kinds(self, ids: TokenIds) -> Tensor:
        kinds = torch.where(ids.observed.values, int(Kind.OBSERVED), int(Kind.SAMPLED)).to(torch.int8)
        t = self.tokens
        kinds[(ids.completion.offsets[t.row] + t.position)[t.forced]] = int(Kind.FORCED)
        return kinds

    def _stages(self) -> list[tuple[str, Tensor, list[float], list[bool]]]:
        maker = next((s.method for s in self.batch.seen if s.hook == "advantages"), "")
        found = [(f"{maker}.advantages" if maker else "host", first_advantages(self.batch))]
        shaped = [s for s in self.batch.seen if s.hook == "shape" and isinstance(s.result, Shape)]
        after = [(f"{s.method}.shape", shaped_advantages(s)) for s in shaped]
        found += [(name, values) for name, values in after if values is not None]
        row, n = self.tokens.row, len(self.rollouts)
        first = torch.tensor(self.start)[row]
        same = [(torch.bincount(row[v != v[first]], minlength=n) == 0).tolist() for _, v in found]
        return [(m, v, self.of_row.mean(v).tolist(), s) for (m, v), s in zip(found, same, strict=True)]

    def _left(self) -> list[tuple[str, str, list[bool], Any]]:
        """(method, hook, of each row whether it left, (tokens,) bool array): what each hook took out that was
        still there."""
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
                found.append((s.method, s.hook, gone_rows.tolist(), gone_tokens.numpy()))
        return found


def _arrays(rows: Jagged) -> Callable[[int], Any]:
    values, bounds = rows.values.numpy(), rows.offsets.tolist()
    return lambda i: values[bounds[i] : bounds[i + 1]]


def _places_of(rollouts: Rollouts) -> Tensor:
    if rollouts.turns is None:
        return torch.zeros(0, dtype=torch.int64)
    stay = rollouts.kept[rollouts.turns.row]
    return torch.where(stay, torch.cumsum(stay, 0) - 1, -1)


def row_records(read: Read, decode: Callable[[Sequence[int]], str]) -> list[Record]:
    """Records of the rows of the groups that are recorded.

    Args:
        decode: token ids -> text, special tokens kept.
    """
    chosen = [i for i, g in enumerate(read.rows["group"]) if g in read.batch.groups]
    notes, plans, known = _notes(read), {g: _plan(*p) for g, p in read.batch.plans.items()}, dict[bytes, str]()

    def text(ids: Any) -> str:
        """Prompts of a group are one text."""
        key = ids.tobytes()
        if key not in known:
            known[key] = decode(ids.tolist())
        return known[key]

    return [_row(read, i, text, decode, plans, notes.get(i, [])) for i in chosen]


def _row(
    read: Read,
    i: int,
    prompt_text: Callable[[Any], str],
    decode: Callable[[Sequence[int]], str],
    plans: Mapping[int, Record],
    notes: list[Record],
) -> Record:
    batch, r, t, rows = read.batch, read.rollouts, read.tokens, read.rows
    prompt, completion, kinds = read.prompt(i), read.completion(i), read.kinds(i)
    own = slice(read.start[i], read.start[i + 1])
    position, n = read.position[own], len(completion)

    def spread(values: Any, fill: Any = np.nan, dtype: Any = np.float32) -> Any:
        """Values of the batch's tokens -> one for each token of the completion."""
        if values is None or not len(position):
            return None
        full = np.full(n, fill, dtype)
        full[position] = values[own]
        return full

    group = rows["group"][i]
    return {
        "schema": schema.VERSION,
        "batch": r.batch,
        "row": i,
        **{name: rows[name][i] for name in ("group", "prompt_index", "rollout", "index")},
        "prompt": prompt_text(prompt),
        "completion": decode(completion.tolist()),
        "prompt_ids": prompt,
        "completion_ids": completion,
        "kinds": kinds,
        "origin": _origin(read, i, batch.plans.get(group)),
        "version": rows["version"][i],
        "newest_version": rows["newest_version"][i],
        "current_version": r.current_version,
        "versions": spread(t.version, -1, np.int32),
        "truncated": rows["truncated"][i],
        "length": rows["length"][i],
        "rewards": with_names(zip(r.reward_names, rows["rewards"][i], strict=True)),
        "raw_reward": rows["raw"][i],
        "reward": rows["reward"][i],
        "rewarded": [{"method": m, "reward": v[i]} for m, v in read.rewarded],
        "trained": rows["trained"][i],
        "left": _left_of(read, i),
        "token_left": _token_left(read, i, own, n),
        "grpo": rows["grpo"][i],
        "advantage": rows["advantage"][i],
        "advantages": [
            {"stage": name, "advantage": mean[i], "tokens": None if same[i] else spread(values)}
            for name, values, mean, same in read.stages
        ]
        if len(position)
        else [],
        **{name: spread(getattr(t, name)) for name in FLOAT_SIGNALS},
        "turns": _turns(read, i, own),
        **_origin_of(read, i, decode),
        "plan": plans.get(group),
        "notes": notes,
        "row_columns": with_names((name, v[read.place[i]]) for name, v in read.row_columns if bool(r.kept[i])),
        "token_columns": [{"name": name, "values": _filled(n, position, v[own])} for name, v in read.token_columns],
    }


def _numbers(values: Any) -> Tensor:
    return torch.as_tensor(values, dtype=torch.float64)


def _filled(n: int, position: Any, values: Any) -> Any:
    full = np.full(n, np.nan, np.float32)
    full[position] = values
    return full


def _origin(read: Read, i: int, planned: Any) -> str:
    if planned is not None and read.rows["rollout"][i] < len(planned[0].given):
        return "given"
    return "carried" if read.rows["version"][i] < read.rows["newest_version"][i] else "generated"


def _left_of(read: Read, i: int) -> list[Record]:
    found = []
    for (method, hook, rows, _), tokens in zip(read.left, read.left_tokens, strict=True):
        if rows[i] or tokens[i]:
            count = read.rows["length"][i] if rows[i] else tokens[i]
            found.append({"method": method, "hook": hook, "tokens": count})
    return found


def _token_left(read: Read, i: int, own: slice, length: int) -> Any:
    """Of each token, which of the row's entries of `left` took it out; None if all of them stay."""
    if read.whole[i]:
        return None
    full, number = np.full(length, schema.STAYS, np.int8), 0
    for (_, _, _, tokens), counts in zip(read.left, read.left_tokens, strict=True):
        if counts[i]:
            full[read.position[own][tokens[own]]] = number
            number += 1
    return full


def _turns(read: Read, i: int, row: slice) -> list[Record] | None:
    table, turn = read.rollouts.turns, read.tokens.turn
    if table is None:
        return None
    found = []
    for number in read.turns.get(i, ()):
        own = read.tokens.position[row][turn[row] == number] if turn is not None else ()
        found.append(
            {
                "turn": int(table.turn[number]),
                "start": int(own.min()) if len(own) else None,  # type: ignore[union-attr]
                "stop": int(own.max()) + 1 if len(own) else None,  # type: ignore[union-attr]
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
    parent = read.row_of_number.get((read.rows["group"][i], origin["parent"]))
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
    place = read.turn_place[number]
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
            "lr_scale": None if u.scaled is None else float(np.prod(list(u.scaled.values()))),
            "scaled": [{"method": m, "lr_scale": v} for m, v in (u.scaled or {}).items()],
            "stats": with_names(u.stats.items()),
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


def batch_record(read: Read, now: float, host: str, methods: Sequence[str]) -> Record:
    """The record of a batch, with a summary of all its groups."""
    batch, r, t = read.batch, read.rollouts, read.tokens
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
        "stages": [name for name, *_ in read.stages],
        "selected_by": batch.selected[0],
        "selected": list(batch.selected[1]),
        "stats": with_names(batch.stats.items()),
        "prompts": list(batch.prompts),
        "groups": [
            {"group": g, "recorded": g in batch.groups, **{name: values[k] for name, values in columns.items()}}
            for k, g in enumerate(groups.ids.tolist())
        ],
    }
