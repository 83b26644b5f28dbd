"""What the scripts in this folder share: their options, means over seeds with intervals, and the files of results."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import torch

from rl_plugins.compare.report import Interval

matplotlib.use("Agg")  # Figures are only written to files.
torch.set_num_threads(1)  # The tensors are tiny.


def arguments(description: str, seeds: int) -> argparse.Namespace:
    """The options of a script: seeds and the folder of the results. A description of several lines is kept as it is."""
    layout = argparse.RawDescriptionHelpFormatter if "\n" in description else argparse.HelpFormatter
    parser = argparse.ArgumentParser(description=description, formatter_class=layout)
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--out", type=Path, default=Path("evidence-results"))
    return parser.parse_args()


def summary(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """The mean over seeds and the half width of its 95 % t interval."""
    found = Interval.of(values)
    return {"mean": found.mean, "ci95": found.half}


def interval(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """The same as `summary`, and the values of the seeds."""
    return {**summary(values), "seeds": [round(float(v), 6) for v in values]}


def save(
    out: Path, name: str, results: dict[str, Any], plot: Callable[[Path], None], start: float | None = None
) -> None:
    """Writes results and figure. With the time of the start, it also notes the seconds since then and prints a line."""
    files = out / f"{name}.json", out / f"{name}.png"
    if start is not None:
        results["seconds"] = time.time() - start
    out.mkdir(parents=True, exist_ok=True)
    files[0].write_text(json.dumps(results, indent=1))
    plot(files[1])
    if start is not None:
        print(f"\n{results['seconds']:.0f} s; written: {files[0]}, {files[1]}")
