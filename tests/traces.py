"""Traces whose every number is known, written as files without a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_plugins.runtime.trace import schema

Record = dict[str, Any]


def by_name(values: Sequence[Record]) -> dict[str, float]:
    """Named numbers of a record as a mapping."""
    return {v["name"]: v["value"] for v in values}


def named(**values: float) -> list[Record]:
    """The inverse of `by_name`."""
    return [{"name": name, "value": value} for name, value in values.items()]


def a_row(row: int, group: int, tokens: Sequence[int], **changes: Any) -> Record:
    """A record of `rollouts`: sampled, trained, with reward 0; `changes` are other columns."""
    reward = changes.get("raw_reward", 0.0)
    known = {
        "schema": schema.VERSION,
        "batch": 0,
        "row": row,
        "group": group,
        "prompt_index": 100 + group,
        "rollout": row % 4,
        "index": 0,
        "prompt": f"prompt {group}",
        "completion": "".join(chr(97 + t) for t in tokens),
        "prompt_ids": [1],
        "completion_ids": list(tokens),
        "kinds": [1] * len(tokens),
        "origin": "generated",
        "version": 0,
        "newest_version": 0,
        "current_version": 0,
        "truncated": False,
        "length": len(tokens),
        "rewards": named(right=reward),
        "raw_reward": reward,
        "reward": reward,
        "rewarded": [],
        "trained": True,
        "left": [],
        "grpo": 0.0,
        "advantage": 0.0,
        "advantages": [{"stage": "host", "advantage": 0.0, "tokens": None}],
        "notes": [],
        "row_columns": [],
        "token_columns": [],
    }
    return {**known, **changes}


def write_batch(folder: Path, number: int, rows: Sequence[Record], **changes: Any) -> None:
    """Writes a batch and its summary.

    Args:
        folder: of the trace.
        changes: of the summary.
    """
    groups: dict[int, list[Record]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    summary = {
        "schema": schema.VERSION,
        "batch": number,
        "time": datetime.fromtimestamp(1000 + 7 * number, UTC),
        "host": "trl",
        "methods": ["one", "two"],
        "rows": len(rows),
        "trained_rows": sum(r["trained"] for r in rows),
        "tokens": sum(len(r["completion_ids"]) for r in rows),
        "trained_tokens": sum(len(r["completion_ids"]) for r in rows if r["trained"]),
        "current_version": rows[0]["current_version"],
        "stages": ["host"],
        "selected_by": "",
        "selected": [],
        "stats": named(**{"one/value": float(number)}),
        "groups": [_group(own) for own in groups.values()],
    }
    _put(folder, "rollouts", number, [{**r, "batch": number} for r in rows], schema.ROLLOUTS)
    _put(folder, "batches", number, [{**summary, **changes}], schema.BATCHES)
    ids = sorted({i for r in rows for i in r["completion_ids"]})
    _put(folder, "tokens", number, [{"id": i, "text": chr(97 + i % 26)} for i in ids], schema.TOKENS)


def write_updates(folder: Path, number: int, ratios: Sequence[Sequence[Record]]) -> None:
    """Writes the updates of a batch, each with its ratios; the learning rate of update k has the factor 1 / (k + 1)."""
    records = [
        {
            "schema": schema.VERSION,
            "batch": number,
            "update": k,
            "lr_scale": 1 / (k + 1),
            "scaled": [],
            "stats": named(**{"two/weight": 1.0 + k}),
            "ratios": list(own),
        }
        for k, own in enumerate(ratios)
    ]
    _put(folder, "updates", number, records, schema.UPDATES)


def _group(rows: Sequence[Record]) -> Record:
    rewards = [r["raw_reward"] for r in rows]
    return {
        "group": rows[0]["group"],
        "prompt_index": rows[0]["prompt_index"],
        "rows": len(rows),
        "trained": sum(r["trained"] for r in rows),
        "reward": sum(rewards) / len(rows),
        "spread": max(rewards) - min(rewards),
        "change": max(abs(r["advantage"] - r["grpo"]) for r in rows),
        "truncated": sum(r["truncated"] for r in rows),
        "age": max(r["current_version"] - r["version"] for r in rows),
        "recorded": True,
    }


def _put(folder: Path, table: str, number: int, records: Sequence[Mapping[str, Any]], columns: pa.Schema) -> None:
    (folder / table).mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(list(records), columns), folder / table / f"batch-{number:08d}.parquet")
