"""Seconds of `rl-plugins fuse` per GB of weights that are written, by rule and by number of experts.

A base and three experts of bf16 matrices are written into a temporary folder. Arms take turns. `copy` copies the
experts' and the base's files; its time is what the disk and the page cache need. `mean` has all steps switched off.
Wall and CPU time of one thread; minimum and median. Peak memory is that of Python and numpy, from a run of its own.

    python benchmarks/fuse.py --repeat 5
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1")

import torch
from safetensors.torch import save_file

from rl_plugins.commands.fuse.plan import FusionPlan
from rl_plugins.commands.fuse.write import write
from rl_plugins.tools.fusion import FusionRule

RULES = {
    "mean, 3 experts": (3, FusionRule(False, 1.0, 1.0, False)),
    "default, 1 expert": (1, FusionRule()),
    "default, 2 experts": (2, FusionRule()),
    "default, 3 experts": (3, FusionRule()),
    "without dropout, 3 experts": (3, FusionRule(keep=1.0)),
    "SCE, top 0.1, 3 experts": (3, FusionRule(False, 1.0, 0.1, True, "sce")),
}


def build(folder: Path, matrices: int, side: int) -> None:
    """A base and three experts, each with so many square matrices."""
    g = torch.Generator().manual_seed(0)
    base = {f"layer.{i}.weight": torch.randn(side, side, generator=g) for i in range(matrices)}
    for name in ("base", "e0", "e1", "e2"):
        (folder / name).mkdir()
        near = {
            n: (t + (name != "base") * 0.01 * torch.randn(side, side, generator=g)).bfloat16() for n, t in base.items()
        }
        save_file(near, folder / name / "model.safetensors")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--matrices", type=int, default=6)
    parser.add_argument("--side", type=int, default=2048)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gigabytes = arguments.matrices * arguments.side**2 * 2 / 1e9
    times: dict[str, list[tuple[float, float]]] = {"copy": [], **{name: [] for name in RULES}}
    peaks: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        build(folder, arguments.matrices, arguments.side)

        def copied() -> None:
            for source in ("base", "e0", "e1", "e2"):
                shutil.copytree(folder / source, folder / "out" / source)

        def fused(experts: int, rule: FusionRule) -> None:
            write(FusionPlan.of(folder / "base", [str(folder / f"e{i}") for i in range(experts)], folder / "out", rule))

        arms: dict[str, Callable[[], None]] = {"copy": copied}
        arms |= {arm: lambda e=e, r=r: fused(e, r) for arm, (e, r) in RULES.items()}  # type: ignore[misc]
        for _ in range(arguments.repeat):
            for arm, act in arms.items():
                wall, cpu = time.perf_counter(), time.process_time()
                act()
                times[arm].append((time.perf_counter() - wall, time.process_time() - cpu))
                shutil.rmtree(folder / "out")
        for arm, act in arms.items():
            tracemalloc.start()
            act()
            peaks[arm] = tracemalloc.get_traced_memory()[1] / 1e6
            tracemalloc.stop()
            shutil.rmtree(folder / "out")
    found = {}
    for arm, pairs in times.items():
        wall, cpu = ([p[i] / gigabytes for p in pairs] for i in (0, 1))
        ratio = statistics.median(c / m for (_, c), (_, m) in zip(pairs, times["mean, 3 experts"], strict=True))
        found[arm] = {
            "wall_s_per_gb": [min(wall), statistics.median(wall)],
            "cpu_s_per_gb": [min(cpu), statistics.median(cpu)],
            "cpu_ratio_to_mean": ratio,
            "peak_mb": peaks[arm],
        }
        print(f"{arm:27} wall {min(wall):6.2f} {statistics.median(wall):6.2f}  cpu {min(cpu):6.2f} "
              f"{statistics.median(cpu):6.2f} s/GB  ratio {ratio:.2f}  peak {peaks[arm]:.0f} MB")  # fmt: skip
    settings = {"gigabytes": gigabytes, "tensor_mb_float32": arguments.side**2 * 4 / 1e6, "repeat": arguments.repeat}
    arguments.out.write_text(json.dumps({**settings, "arms": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
