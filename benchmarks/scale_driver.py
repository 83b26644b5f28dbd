"""What the driver of TRL does with one generation batch, by size and ranks: load, join, decide, split, dump.

    python benchmarks/scale_driver.py                       # the table of benchmarks/README.md
    python benchmarks/scale_driver.py --rows 1024 --tokens 8192 --ranks 64 --methods gdpo+vade

No model: rows of random lengths are collected as a rank does. The driver unpacks what every rank sends, joins and
decides it, cuts the decision and packs every rank's part. The way in between is not measured. CPU time of one thread,
the least of five batches; every case in a process of its own, for its peak memory.
"""

from __future__ import annotations

import itertools
import json
import pickle
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typer

from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.rollouts import PlanRow, Run
from rl_plugins.runtime.decide import decide
from rl_plugins.runtime.ranks import dumps
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.trl.generation.decided import local_decisions
from rl_plugins.trl.generation.rows import collect, rollouts_of
from rl_plugins.trl.generation.work import Row, Work

RANKS, GROUP = 64, 8
PARTS = ("load", "join", "decide", "split", "dump")
BY_ROWS = ("gdpo", "vade", "mc_grpo")
BY_TOKENS = ("mssr_shaping", "d3s", "aepo_advantages")
SIZES = ((256, 14), (1024, 1024), (1024, 8192), (4096, 8192), (8192, 32768))
TOO_LARGE = 10**8  # tokens, for methods that read them in 16 GB


class Batch:
    """One generation batch as the ranks of TRL have it.

    Args:
        names: methods.
        rows: of all ranks.
        tokens: of a row on average; lengths lie between a half and one and a half of it.
        ranks: processes.
        watchers: of the stack.
        chat: of the run.
    """

    def __init__(
        self,
        names: list[str],
        rows: int,
        tokens: int,
        ranks: int = RANKS,
        params: dict[str, Any] | None = None,
        watchers: Sequence[Any] = (),
        chat: Any = None,
    ) -> None:
        self.stack: MethodStack = build_stack(names, params, watchers=watchers)
        self.rows, self.ranks = rows, ranks
        draw = torch.Generator().manual_seed(0)
        self.length = torch.randint(tokens // 2, tokens * 3 // 2 + 1, (rows,), generator=draw)
        self.rewards = torch.rand(rows, 2, generator=draw).round()
        plans = [PlanRow(g, g, GROUP) for g in range(rows // GROUP)]
        flat = [Row(p, i) for p in plans for i in range(GROUP)]
        each = rows // ranks
        self.prompts: Any = SimpleNamespace(numbered=True)
        parts = [flat[k * each : (k + 1) * each] for k in range(ranks)]
        self.work = Work(self.prompts, parts, regular=True, payload=[None] * rows)
        self.trainer: Any = SimpleNamespace(
            methods=self.stack,
            eos_token_ids=[1],
            processing_class=SimpleNamespace(pad_token_id=0),
            mask_truncated_completions=False,
            state=SimpleNamespace(global_step=1),
            reward_weights=torch.ones(2),
            reward_func_names=["right", "short"],
        )
        size = 4 * rows // GROUP
        self.stack.start(Run("trl", "1.16", None, size, (), ("right", "short"), GROUP, 10, 10, 2 * tokens, chat=chat))

    def made(self, rank: int) -> tuple[Any, dict[str, torch.Tensor]]:
        """What TRL generated on a rank, and the columns somebody reads."""
        each = self.rows // self.ranks
        length = self.length[rank * each : (rank + 1) * each].tolist()
        ids, prompts = [self.ids_of(n) for n in length], [range(2, 66)] * each
        made: Any = SimpleNamespace(ids=ids, prompts=prompts, tool_mask=None, completions=[None] * each)
        names = {"old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies"} & self.stack.token_columns
        columns = {n: -torch.rand(each, max(length), generator=torch.Generator().manual_seed(rank)) for n in names}
        return made, columns

    def ids_of(self, n: int) -> Any:
        """A completion of so many tokens."""
        return range(2, n + 2)

    def part(self, rank: int) -> Any:
        """What a rank gives the driver."""
        made, columns = self.made(rank)
        return collect(self.trainer, self.work.rows[rank], made, torch.zeros(len(made.ids)), columns)[0]

    def joined(self, parts: list[Any]) -> Any:
        return rollouts_of(self.trainer, self.work, self.rewards, parts)

    def decided(self, seen: Any) -> Any:
        return decide(self.stack, seen.rollouts, seen.tokens, None, grpo_advantages, self.rows)

    def split(self, decision: Any) -> Any:
        return local_decisions(decision, [self.rows // self.ranks] * self.ranks, self.rows)


def measure(names: list[str], rows: int, tokens: int, ranks: int) -> dict[str, Any]:
    """Seconds, bytes and peak memory of one case, in this process."""
    torch.set_num_threads(1)
    batch = Batch(names, rows, tokens, ranks)
    packed, opened = (dumps, pickle.loads) if ranks > 1 else (lambda part: part, lambda part: part)
    sent = [packed(batch.part(k)) for k in range(ranks)]
    took: dict[str, list[float]] = {part: [] for part in PARTS}

    def timed(what: str, call: Any, *args: Any) -> Any:
        start = time.process_time()
        out = call(*args)
        took[what].append(time.process_time() - start)
        return out

    back: list[Any] = []
    for _ in range(5):
        parts = timed("load", lambda: [opened(p) for p in sent])
        own = timed("split", batch.split, timed("decide", batch.decided, timed("join", batch.joined, parts)))
        back = timed("dump", lambda own=own: [packed(("done", p)) for p in own])
    count = int(batch.length.sum())
    found = {
        "methods": "+".join(names),
        "rows": rows,
        "tokens": tokens,
        "ranks": ranks,
        **{what: min(values) for what, values in took.items()},
        "whole": sum(min(values) for values in took.values()),
        "bytes_to_driver_per_rank": max(map(len, sent)) if ranks > 1 else 0,
        "bytes_back_per_rank": max(map(len, back)) if ranks > 1 else 0,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6,
    }
    if batch.stack.reads_tokens:  # row, position, advantages, keep, forced, and the columns
        per_token = 8 + 8 + 8 + 1 + 1 + 4 * len(batch.stack.token_columns)
        memory = torch.ones(count * per_token // 8, dtype=torch.float64)
        start = time.process_time()
        memory.clone()
        found |= {"bytes_per_token": per_token, "copy": time.process_time() - start}
    return found


def main(
    rows: int = 0,
    tokens: int = 0,
    ranks: int = RANKS,
    methods: str = "",
    out: Path = Path("benchmarks/scale_driver.json"),
) -> None:
    """Without options: all sizes, ranks and methods, each in a process of its own, into `out`."""
    if methods and rows and tokens:
        print(json.dumps(measure(methods.split("+"), rows, tokens, ranks)))
        return
    found = []
    for size, ranks, name in itertools.product(SIZES, (1, 64, 512), (*BY_ROWS, *BY_TOKENS)):
        if size[0] < ranks or (name in BY_TOKENS and size[0] * size[1] > TOO_LARGE):
            continue
        options = ["--rows", str(size[0]), "--tokens", str(size[1]), "--ranks", str(ranks), "--methods", name]
        done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, check=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
        print(found[-1], flush=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
