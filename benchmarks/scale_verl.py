"""What the driver of verl does with one batch, by size: ours beside verl's own `_compute_advantage`.

    python benchmarks/scale_verl.py                 # 1,024 rows x 1,024 and x 8,192 tokens, into scale_verl.json

TransferQueue is replaced by rows in memory for both, so what remains is the work itself. CPU time of one thread, the
least of three; every case in a process of its own. `select` reads rewards and lengths, `decide_advantages` decides and
writes the advantages.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import typer

os.environ.setdefault("VERL_PLATFORM", "cpu")
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hosts" / "verl"))

METHODS = ("gdpo", "mc_grpo", "d3s", "mssr_shaping")
SIZES = ((1024, 1024), (1024, 8192))
GROUP = 8


def measure(method: str, rows: int, tokens: int) -> dict[str, Any]:
    """Seconds and peak memory of one case, in this process."""
    from memory_queue import MemoryQueue
    from transfer_queue import KVBatchMeta
    from verl.trainer.ppo.v1 import trainer_base

    from rl_plugins.verl import batch as module
    from rl_plugins.verl.config import Settings, compose
    from rl_plugins.verl.prompts import COLUMN

    torch.set_num_threads(1)
    config = compose(
        [
            "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.rollout.n={GROUP}",
            f"data.max_response_length={2 * tokens}",
            f"data.train_batch_size={rows // GROUP}",
        ]
    )
    settings = Settings((method,), rewards={"right": 1.0, "short": 1.0} if method == "gdpo" else {})
    draw = torch.Generator().manual_seed(0)
    took: dict[str, list[float]] = {"verl": [], "select": [], "decide_advantages": []}

    def timed(what: str, call: Any, *args: Any) -> Any:
        start = time.process_time()
        out = call(*args)
        took[what].append(time.process_time() - start)
        return out

    for _ in range(3):
        queue = MemoryQueue()
        module.tq = trainer_base.tq = queue  # type: ignore[attr-defined]
        lengths = torch.randint(tokens // 2, tokens * 3 // 2 + 1, (rows,), generator=draw).tolist()
        queue.put_rows({f"u{i // GROUP}_{i % GROUP}_0": _row(i, n, draw, COLUMN) for i, n in enumerate(lengths)})
        tags = [{"global_steps": 1, "min_global_steps": 0} for _ in lengths]
        batch = KVBatchMeta(partition_id="train", keys=list(queue.rows), tags=tags)
        mine = module.Decisions(settings.stack(), config, settings.rewards, _Tokenizer(), rows)
        mine.stack.start(_run(rows))
        selected = timed("select", mine.select, batch)
        host = SimpleNamespace(config=config)
        timed("verl", trainer_base.PPOTrainer._compute_advantage, host, selected.batch, {})
        timed("decide_advantages", mine.decide_advantages, selected.batch, selected)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
    least = {what: min(values) for what, values in took.items()}
    return {"method": method, "rows": rows, "tokens": tokens, **least, "peak_gb": peak}


def _row(i: int, length: int, draw: torch.Generator, column: str) -> dict[str, Any]:
    scores = torch.zeros(length)
    scores[-1] = float(i % 3 == 0)
    note = {"prompt_index": i // GROUP, "wave": "w", "group": i // GROUP, "place": i // GROUP, "round": 0}
    note |= {"prefix": [], "max_tokens": None, "given": [], "payload": None}
    return {
        "uid": f"u{i // GROUP}",
        "responses": torch.full((length,), 5),
        "response_mask": torch.ones(length, dtype=torch.int64),
        "loss_mask": torch.ones(length, dtype=torch.int64),
        "rm_scores": scores,
        "old_log_probs": -torch.rand(length, generator=draw),
        "entropy": torch.rand(length, generator=draw),
        "extra_fields": {"reward_extra_info": {"right": float(i % 3 == 0), "short": float(i % 2)}},
        column: note,
    }


class _Tokenizer:
    eos_token_id, pad_token_id = 1, 0


def _run(rows: int) -> Any:
    from rl_plugins.core.rollouts import Run

    return Run("verl", "0.9.1", None, rows, (), ("score",), GROUP, 10, 10, 32768)


def main(rows: int = 0, tokens: int = 0, method: str = "", out: Path = Path("benchmarks/scale_verl.json")) -> None:
    """Without options: all sizes and methods, each in a process of its own, into `out`."""
    if method:
        print(json.dumps(measure(method, rows, tokens)))
        return
    found = []
    for size in SIZES:
        for name in METHODS:
            options = ["--rows", str(size[0]), "--tokens", str(size[1]), "--method", name]
            done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, check=False)
            if done.returncode:
                raise SystemExit(done.stderr)
            found.append(json.loads(done.stdout.splitlines()[-1]))
            print(found[-1], flush=True)
    out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    typer.run(main)
