"""Seconds per training step of the TRL adapter: stock TRL, `methods: []`, and methods, in one run.

Every arm trains the embedded policy on the same prompts with the same budget; arms take turns, so that a machine whose
speed drifts treats them alike. Reported: minimum and median over repetitions, and the ratio to stock per repetition.

    python benchmarks/trl_overhead.py --repeat 9 --steps 6 --rows 256
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import torch
from cpu_runs import cpu_run

from rl_plugins.lab.demo import rewards

ARMS: dict[str, dict[str, Any]] = {
    "stock": {},
    "methods: []": {"methods": []},
    "gdpo": {"methods": ["gdpo"]},
    "vade": {"methods": ["vade"]},
    "mc_grpo": {"methods": ["mc_grpo"], "method_params": {"mc_grpo": {"advantage_clip": 3}}},
    "vade, mc_grpo": {"methods": ["vade", "mc_grpo"], "method_params": {"mc_grpo": {"advantage_clip": 3}}},
    "stock, 2 updates": {"num_iterations": 2},
    "minpro, 2 updates": {"methods": ["minpro"], "num_iterations": 2},
}


Clock = Callable[[], float]


class Parts:
    """Seconds inside the generation part (generate, score, decide) and inside the rest of a step."""

    def __init__(self, trainer: Any, clock: Clock) -> None:
        self.generation: list[float] = []
        host = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            start = clock()
            out = host(inputs)
            self.generation.append(clock() - start)
            return out

        trainer._generate_and_score_completions = timed


def measure(
    arm: dict[str, Any], folder: Path, rows: int, steps: int, clock: Clock = time.perf_counter
) -> tuple[float, float]:
    """(seconds per optimizer step, of them outside generation), without the first step."""
    stock = "methods" not in arm
    per_batch = arm.get("num_iterations", 1)
    t = cpu_run(
        folder, rows, (steps + 1) * per_batch, [rewards.digits, rewards.format], stock, learning_rate=1e-5, **arm
    )
    parts, times = Parts(t, clock), []
    step = t.training_step

    def timed(*a: Any, **k: Any) -> Any:
        start = clock()
        out = step(*a, **k)
        times.append(clock() - start)
        return out

    t.training_step = timed
    torch.manual_seed(0)
    t.train()
    total = sum(times[per_batch:]) / (steps * per_batch)
    return total, total - sum(parts.generation[1:]) / (steps * per_batch)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=9)
    parser.add_argument("--steps", type=int, default=6, help="timed generation batches per repetition")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/trl_overhead.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()
    results: dict[str, list[tuple[float, float]]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeat):
            for name, arm in ARMS.items():
                results[name].append(measure(dict(arm), Path(folder), args.rows, args.steps))
    print(f"{'arm':20} {'step min':>9} {'median':>9} {'update min':>11} {'ratio of steps to its baseline':>32}")
    table = {}
    for name, values in results.items():
        base = results["stock, 2 updates" if "2 updates" in name else "stock"]
        ratio = statistics.median(v[0] / b[0] for v, b in zip(values, base, strict=True))
        update = statistics.median(v[1] / b[1] for v, b in zip(values, base, strict=True))
        row = {
            "step_min": min(v[0] for v in values),
            "step_median": statistics.median(v[0] for v in values),
            "update_min": min(v[1] for v in values),
            "ratio": ratio,
            "update_ratio": update,
        }
        table[name] = row
        print(
            f"{name:20} {row['step_min'] * 1e3:7.0f}ms {row['step_median'] * 1e3:7.0f}ms"
            f" {row['update_min'] * 1e3:9.0f}ms {ratio:14.2f} (update {update:.2f})"
        )
    args.out.write_text(
        json.dumps({"rows": args.rows, "steps": args.steps, "repeat": args.repeat, "arms": table}, indent=1)
    )


if __name__ == "__main__":
    main()
