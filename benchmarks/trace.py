"""What the trace costs the driver of TRL, by what is recorded, in one run with the arms in turns.

    python benchmarks/trace.py            # 1,024 rows of 2,048 tokens on average
    python benchmarks/trace.py --rows 256 --tokens 512

The recorder gets the same objects in verl, whose run is not timed here. Each arm joins, decides and splits one
generation batch of `mc_grpo` as the driver does (no model). "waits" is the CPU time of the driver's thread. "writes" is
the wall time of the thread that makes the files, next to nothing else. The median of the repetitions.
"""

from __future__ import annotations

import json
import os
import platform
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from scale_driver import RANKS, Batch

from rl_plugins.demo.policy import build_tokenizer
from rl_plugins.runtime.chat import TokenizerChat
from rl_plugins.runtime.trace import trace_of

ARMS: dict[str, Any] = {
    "off": None,
    "16 groups": {"groups": 16},
    "all": True,
    "16 groups, entropies": {"groups": 16, "signals": ["entropies"]},
    "all, entropies": {"signals": ["entropies"]},
}


class _Small(TokenizerChat):
    """The demo's tokenizer has 59 tokens; ids beyond them are folded into it."""

    def decode(self, tokens: Any, special: bool = False) -> str:
        return super().decode([t % 59 for t in tokens], special)


class _Random(Batch):
    """Completions of random ids of a vocabulary of 32,768, as lists: files of equal ids would be far too small."""

    def ids_of(self, n: int) -> Any:
        return np.random.default_rng(n).integers(2, 32768, n).tolist()


def measure(options: Any, rows: int, tokens: int) -> dict[str, float]:
    """Seconds and bytes of one batch of one arm."""
    with tempfile.TemporaryDirectory() as folder:
        watchers = trace_of(options, "trace", folder)
        batch = _Random(["mc_grpo"], rows, tokens, watchers=watchers, chat=_Small(build_tokenizer()))
        parts = [batch.part(k) for k in range(RANKS)]
        start = time.thread_time()
        batch.split(batch.decided(batch.joined(parts)))
        found = {"waits": time.thread_time() - start}
        start = time.perf_counter()
        for watcher in watchers:
            watcher._writer.wait()  # type: ignore[attr-defined]
        found["writes"] = time.perf_counter() - start
        files = list(Path(folder).rglob("*.parquet"))
        found["megabytes"] = sum(p.stat().st_size for p in files) / 1e6
    return found


def main(rows: int = 1024, tokens: int = 2048, repeats: int = 5, out: Path = Path("benchmarks/trace.json")) -> None:
    """Measure all arms."""
    torch.set_num_threads(1)
    found: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    names = list(ARMS)
    for repeat in range(repeats):
        random.Random(repeat).shuffle(names)
        for name in names:
            found[name].append(measure(ARMS[name], rows, tokens))
    table = {
        name: {what: statistics.median(m[what] for m in measured) for what in measured[0]}
        for name, measured in found.items()
    }
    for name, values in table.items():
        ratio = values["waits"] / table["off"]["waits"]
        print(f"{name:<22}" + "".join(f"{what} {v:8.3f}  " for what, v in values.items()) + f"{ratio:.2f} times off")
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    out.write_text(json.dumps({"rows": rows, "tokens": tokens, "machine": machine, "arms": table}, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
