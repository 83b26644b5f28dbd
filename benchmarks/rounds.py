"""A step of two and three rounds against one of as many rollouts, in TRL on the CPU.

`xrpo_allocate` makes 4 rollouts of every prompt and then hands out the rest in further rounds, always as many rows in
all. With all 8 in the first round it is asked for more and plans nothing, which is what the rounds themselves cost.
Arms take turns; the ratio is the median over repetitions of CPU time to `methods: []` of the same repetition.

    python benchmarks/rounds.py --repeat 7 --steps 4 --rows 256
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import torch
from trl_overhead import measure


def phases(n: int, n_first: int = 4) -> dict[str, Any]:
    return {"methods": ["xrpo_allocate"], "method_params": {"xrpo_allocate": {"phases": n, "n_first": n_first}}}


ARMS: dict[str, dict[str, Any]] = {
    "methods: []": {"methods": []},
    "one round, asked for more": phases(2, n_first=8),
    "two rounds": phases(2),
    "three rounds": phases(3),
    "five rounds": phases(5),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--steps", type=int, default=4, help="timed generation batches per repetition")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/rounds.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    gc.freeze()
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeat):
            for name, arm in ARMS.items():
                values = measure({"num_generations": 8, **arm}, Path(folder), args.rows, args.steps, time.process_time)
                found[name].append(values)
    table = {}
    for name, values in found.items():
        base = found["methods: []"]
        generation = [(v[0] - v[1]) / (b[0] - b[1]) for v, b in zip(values, base, strict=True)]
        table[name] = {
            "step_min": min(v[0] for v in values),
            "step_median": statistics.median(v[0] for v in values),
            "ratio": statistics.median(v[0] / b[0] for v, b in zip(values, base, strict=True)),
            "generation_ratio": statistics.median(generation),
        }
        row = table[name]
        print(
            f"{name:26} {row['step_min'] * 1e3:6.0f} ms, median {row['step_median'] * 1e3:6.0f} ms, step x "
            f"{row['ratio']:.2f}, generation, rewards and decision x {row['generation_ratio']:.2f}"
        )
    content = {"rows": args.rows, "steps": args.steps, "repeat": args.repeat, "arms": table}
    args.out.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
