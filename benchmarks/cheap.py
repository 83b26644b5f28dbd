"""Cheap copies of a policy (`rl_plugins.runtime.cheap`), and steps of the diffusion trainer that explore with one.

`passes` are two DiTs of diffusers with random weights: the demo's of 200,132 parameters (width 64) with 64 rows, and
one of width 768 with 4 layers and 64 places per image, with 8 rows. CPU milliseconds of a pass of the policy and of
each copy, and of a refresh after an update. `steps` is the demo's DiT with objective nft, 4 prompts of 6 samples in 10
steps: 6 of 6 samples, 6 of 24 exact ones (`sol_rl_select`), and 6 of 24 seeds explored in 6 steps (`sol_rl`). Arms take
turns; ratios are medians over repetitions of an arm to the first one in the same repetition.

    python benchmarks/cheap.py
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import io
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import torch
from diffusers import DiTTransformer2DModel

from rl_plugins.diffusion import DiffusionConfig, DiffusionTrainer
from rl_plugins.lab.demo import shapes
from rl_plugins.runtime.cheap import CheapCopy, CheapOptions

torch.set_num_threads(1)
PRECISIONS = ("bf16", "int8", "fp4")
ARMS: dict[str, tuple[list[str], dict[str, Any], str]] = {
    "6 of 6": (["sol_rl_advantages"], {}, "fp4"),
    "6 of 24 exact": (["sol_rl_select", "sol_rl_advantages"], {}, "fp4"),
    **{f"6 of 24 explored, {p}": (["sol_rl"], {}, p) for p in PRECISIONS},
}


def timed(work: Callable[[], Any]) -> float:
    start = time.process_time()
    work()
    return 1000 * (time.process_time() - start)


def wide() -> DiTTransformer2DModel:
    return DiTTransformer2DModel(
        num_attention_heads=12,
        attention_head_dim=64,
        in_channels=4,
        num_layers=4,
        sample_size=16,
        patch_size=2,
        num_embeds_ada_norm=4,
        norm_num_groups=1,
    )


def passes(repetitions: int) -> list[dict[str, Any]]:
    out = []
    for name, model, rows in (("demo", shapes.build_model(), 64), ("width 768", wide(), 8)):
        model = model.eval()
        size, channels = model.config.sample_size, model.config.in_channels
        x, classes = torch.randn(rows, channels, size, size), torch.zeros(rows, dtype=torch.int64)
        level = torch.full((rows,), 500.0)
        copies = {p: CheapCopy(model, CheapOptions(p)) for p in PRECISIONS}
        models = {"policy": model, **{p: c.module for p, c in copies.items()}}
        found: dict[str, list[float]] = {p: [] for p in models}
        refreshed: dict[str, list[float]] = {p: [] for p in copies}
        with torch.no_grad():
            for i in range(repetitions + 1):
                for p, m in models.items():
                    work = partial(m, x, timestep=level, class_labels=classes, return_dict=False)
                    work()  # so that every arm finds its own weights in the cache, not those of the arm before
                    found[p].append(timed(work))
                for p, c in copies.items():
                    refreshed[p].append(timed(partial(c.refresh, i + 1)))
        for p, values in found.items():
            ratio = [v / e for v, e in zip(values[1:], found["policy"][1:], strict=True)]
            row = {"model": name, "parameters": sum(q.numel() for q in model.parameters()), "copy": p}
            row |= {"pass": round(statistics.median(values[1:]), 2), "ratio": round(statistics.median(ratio), 3)}
            if p in refreshed:
                row |= {"layers": f"{copies[p].layers} of {copies[p].linear}"}
                row |= {"refresh": round(statistics.median(refreshed[p][1:]), 2)}
            out.append(row)
    return out


def trainer(folder: str, arm: str) -> DiffusionTrainer:
    methods, params, precision = ARMS[arm]
    args = DiffusionConfig(
        output_dir=folder,
        methods=methods,
        method_params=params,
        batches=10**6,
        prompts_per_batch=4,
        group_size=6,
        steps=10,
        learning_rate=1e-4,
        objective="nft",
        use_cpu=True,
        progress=False,
    )
    shape = (1, shapes.SIZE, shapes.SIZE)
    model, cheap = shapes.build_model(), CheapOptions(precision)  # type: ignore[arg-type]
    with contextlib.redirect_stdout(io.StringIO()):
        made = DiffusionTrainer(
            model, shapes.centred, list(range(4)), args, shape, scheduler=shapes.scheduler(), cheap=cheap
        )
    made._start()
    made.policy.refresh_cheap()
    return made


def steps(repetitions: int, folder: str) -> list[dict[str, Any]]:
    arms = {name: trainer(folder, name) for name in ARMS}
    found: dict[str, list[float]] = {name: [] for name in arms}
    counts: dict[str, tuple[int, int]] = {}
    for _ in range(repetitions + 1):
        for name, made in arms.items():
            made.policy.rows = made.policy.cheap_rows = 0

            def step(made: DiffusionTrainer = made) -> None:
                made.policy.conditions.forget()
                made.updater.on_batch(made.batches.make(made.updater.step), made.updater.step)

            found[name].append(timed(step))
            counts[name] = (made.policy.rows - made.policy.cheap_rows, made.policy.cheap_rows)
    first = found["6 of 6"][1:]
    return [
        {
            "arm": name,
            "exact passes": counts[name][0],
            "cheap passes": counts[name][1],
            "step": round(statistics.median(values[1:]), 1),
            "ratio": round(statistics.median(v / f for v, f in zip(values[1:], first, strict=True)), 3),
        }
        for name, values in found.items()
    ]


def keep_memory() -> None:
    """Lets glibc keep tensors of up to 32 MiB when they are freed. Otherwise it depends on what ran before whether they
    go back to the system, and int8 and fp4, which make many of them, differ by half from run to run."""
    libc = ctypes.CDLL("libc.so.6")
    for option, size in ((-1, 2**31 - 1), (-3, 2**25)):  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD
        assert libc.mallopt(option, size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15, help="timed passes and batches of every arm")
    given = parser.parse_args()
    keep_memory()
    gc.freeze()  # without this each collection walks through all imported modules
    with tempfile.TemporaryDirectory() as folder:
        found = {"passes": passes(given.repetitions), "steps": steps(given.repetitions, folder)}
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    for title, rows in found.items():
        print(title)
        for row in rows:
            print("  " + "  ".join(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
