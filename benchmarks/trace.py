"""What the trace costs the drivers of TRL and verl, by what is recorded, in one run with the arms in turns.

    python benchmarks/trace.py            # 1,024 rows of 2,048 tokens on average
    python benchmarks/trace.py --rows 256 --tokens 512

Each arm joins, decides and splits one generation batch of `mc_grpo` as the driver of TRL does, or selects and settles
it as that of verl does, with rows in memory in place of TransferQueue (no model). "waits" is the CPU time of the
driver's thread. "writes" is the CPU time of the thread that makes the files, after it. The median of the repetitions.
"step" is the CPU time, of all threads, of a training step of TRL of 256 rows of 14 tokens.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import typer
from scale_driver import RANKS, Batch
from trl_overhead import measure as step_of

from rl_plugins.lab.demo.policy import build_tokenizer
from rl_plugins.runtime.chat import TokenizerChat
from rl_plugins.runtime.trace import trace_of

os.environ.setdefault("VERL_PLATFORM", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts" / "verl"))

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
        start = time.process_time()
        for watcher in watchers:
            watcher._writer.wait()  # type: ignore[attr-defined]
        found["writes"] = time.process_time() - start
        files = list(Path(folder).rglob("*.parquet"))
        found["megabytes"] = sum(p.stat().st_size for p in files) / 1e6
    return found


def measure_verl(options: Any, rows: int, tokens: int) -> dict[str, float]:
    """The same of the driver of verl."""
    import scale_verl
    from memory_queue import MemoryQueue
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import trainer_base

    from rl_plugins.verl import batch as module
    from rl_plugins.verl.config import Settings, compose

    group = scale_verl.GROUP
    config = compose(
        [
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.rollout.n={group}",
            f"data.max_response_length={2 * tokens}",
            f"data.train_batch_size={rows // group}",
        ]
    )
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(tokens // 2, tokens * 3 // 2 + 1, (rows,), generator=draw).tolist()
    queue = MemoryQueue()
    module.tq = trainer_base.tq = queue  # type: ignore[attr-defined]
    made = {}
    for i, n in enumerate(lengths):
        row = scale_verl._row(i, n, draw)
        row |= {name: torch.randint(2, 32768, (k,), generator=draw) for name, k in (("responses", n), ("prompts", 64))}
        made[f"u{i // group}_{i % group}_0"] = row
    queue.put_rows(made)
    tags = [{"global_steps": 1, "min_global_steps": 0} for _ in lengths]
    batch = KVBatchMeta(partition_id="train", keys=list(queue.rows), tags=tags)
    with tempfile.TemporaryDirectory() as folder:
        settings = Settings(("mc_grpo",), trace=options, output_dir=folder)
        mine = module.Decisions(settings.stack(), config, {}, _SmallTokenizer(), rows)
        mine.stack.start(scale_verl._run(rows))
        start = time.thread_time()
        selected = mine.select(batch)
        waits = time.thread_time() - start
        trainer_base.PPOTrainer._compute_advantage(SimpleNamespace(config=config), selected.batch, {})
        start = time.thread_time()
        mine.decide_advantages(selected.batch, selected)
        found = {"waits": waits + time.thread_time() - start}
        start = time.process_time()
        for watcher in mine.stack.watchers:
            watcher._writer.wait()  # type: ignore[attr-defined]
        found["writes"] = time.process_time() - start
        found["megabytes"] = sum(p.stat().st_size for p in Path(folder).rglob("*.parquet")) / 1e6
    return found


class _SmallTokenizer:
    """The demo's, with ids beyond it folded into it."""

    def __init__(self) -> None:
        self.inner = build_tokenizer()
        self.eos_token_id, self.pad_token_id = self.inner.eos_token_id, self.inner.pad_token_id

    def decode(self, tokens: Any, **options: Any) -> str:
        return str(self.inner.decode([int(t) % 59 for t in tokens], **options))

    def batch_decode(self, rows: Any, **options: Any) -> list[str]:
        return [self.decode(row, **options) for row in rows]


README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- made by trace.py: begin -->", "<!-- made by trace.py: end -->"
HOSTS: dict[str, Callable[[Any, int, int], dict[str, float]]] = {"trl": measure, "verl": measure_verl}


def steps(repeats: int, rows: int = 256) -> dict[str, Any]:
    """CPU seconds of a step of TRL with the embedded policy, of all threads, the least of the repetitions."""
    found: dict[str, list[float]] = {name: [] for name in ("off", "16 groups", "all")}
    for _ in range(repeats):
        for name, took in found.items():
            arm = {"methods": ["mc_grpo"], **({"trace": ARMS[name]} if ARMS[name] else {})}
            with tempfile.TemporaryDirectory() as folder:
                took.append(step_of(arm, Path(folder), rows, 4, time.process_time)[0])
    least = {name: min(took) for name, took in found.items()}
    return {name: {"seconds": seconds, "ratio": seconds / least["off"]} for name, seconds in least.items()}


def main(rows: int = 1024, tokens: int = 2048, repeats: int = 5, out: Path = Path("benchmarks/trace.json")) -> None:
    """Measure all arms."""
    torch.set_num_threads(1)
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)  # on rewards of two levels, in every batch
    machine = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count()}
    told: dict[str, Any] = {"rows": rows, "tokens": tokens, "machine": machine}
    for host, of_host in HOSTS.items():
        of_host(None, 64, 16)  # imports
        found: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
        names = list(ARMS)
        for repeat in range(repeats):
            random.Random(repeat).shuffle(names)
            for name in names:
                found[name].append(of_host(ARMS[name], rows, tokens))
        told[host] = {
            name: {what: statistics.median(m[what] for m in measured) for what in measured[0]}
            for name, measured in found.items()
        }
        for name, values in told[host].items():
            print(f"{host:<6}{name:<22}" + "".join(f"{what} {v:8.3f}  " for what, v in values.items()))
    told["step"] = steps(max(4, repeats))  # fewer differ by a tenth beside other work
    print(told["step"])
    out.write_text(json.dumps(told, indent=1) + "\n")
    before, mark, rest = README.read_text().partition(BEGIN)
    README.write_text(before + mark + table(told) + END + rest.partition(END)[2] if mark else before)


def table(told: dict[str, Any]) -> str:
    """Of the page."""
    lines = ["| recorded | TRL waits | writes | on disk | verl waits | writes | on disk |", "|---" * 7 + "|"]
    for name in ARMS:
        cells = [
            f"{of['waits']:.2f} s | {of['writes']:.2f} s | {of['megabytes']:.1f} MB"
            for of in (told[host][name] for host in HOSTS)
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", "| 256 x 14 in TRL | a step | ratio |", "|---|---|---|"]
    lines += [f"| {name} | {1e3 * of['seconds']:.0f} ms | {of['ratio']:.2f} |" for name, of in told["step"].items()]
    return "\n" + "\n".join(lines) + "\n"


if __name__ == "__main__":
    typer.run(main)
