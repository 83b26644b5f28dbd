"""Three steps that report to W&B and trackio, and what both have stored: `trackers_script.py OUT`, with WANDB_DIR and
TRACKIO_DIR set.

OUT/found.json has `host`, the log of the trainer, and for each of the `trackers` its `metrics` of each step and its
`tables`.
"""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[2])]

import wandb
from harness import length, make, score, stub_sampling
from trackio.sqlite_storage import SQLiteStorage
from wandb.proto.wandb_internal_pb2 import Record

from rl_plugins.runtime.trace.publish import NAME

BLOCK, HEADER = 32768, 7  # of the log format of LevelDB; a file of W&B begins with a header of as many bytes


def main(out: Path) -> None:
    trackers = {"report_to": ["wandb", "trackio"], "project": "tiny", "run_name": "run"}
    trainer = make(out, ["mc_grpo", "vade"], reward=[score, length], max_steps=3, trace={"table": 3}, **trackers)
    with stub_sampling():
        trainer.train()
    wandb.finish()
    host = [told for told in trainer.state.log_history if "loss" in told]
    found = {"host": host, "trackers": {"trackio": of_trackio(), "wandb": of_wandb(out)}}
    (out / "found.json").write_text(json.dumps(found))


def of_trackio() -> dict[str, Any]:
    logs = SQLiteStorage.get_logs("tiny", "run")
    return {
        "metrics": [told for told in logs if "train/loss" in told],
        "tables": [told[NAME]["_value"] for told in logs if NAME in told],
    }


def of_wandb(out: Path) -> dict[str, Any]:
    (file,) = out.rglob("*.wandb")
    logs = []
    for record in map(Record.FromString, records(file.read_bytes())):
        logs.append({"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item})
    files = [file.parent / "files" / told[f"{NAME}/path"] for told in logs if f"{NAME}/path" in told]
    tables = [json.loads(f.read_text()) for f in files]
    return {
        "metrics": [told for told in logs if "train/loss" in told],
        "tables": [[dict(zip(t["columns"], row, strict=True)) for row in t["data"]] for t in tables],
    }


def records(log: bytes) -> Iterator[bytes]:
    """W&B's package can write such a file, and not read it."""
    place, parts = HEADER, b""
    while place + HEADER <= len(log):
        if (left := BLOCK - place % BLOCK) < HEADER:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", log[place : place + HEADER])
        parts += log[place + HEADER : place + HEADER + size]
        place += HEADER + size
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


if __name__ == "__main__":
    main(Path(sys.argv[1]))
