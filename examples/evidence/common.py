"""What the scripts in this folder share: their options, means over seeds with intervals, and the files of results."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_plugins.lab.compare import figures
from rl_plugins.lab.compare.report import Interval

torch.set_num_threads(1)  # The tensors are tiny.

Cells = Iterable[Mapping[str, float]]  # a mean over seeds with the half width of its interval each, as of `summary`


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


def save(out: Path, name: str, results: dict[str, Any], draw: Callable[[], Figure], start: float | None = None) -> None:
    """Writes results and figure, the latter for light and for dark pages. With the time of the start, it also notes the
    seconds since then and prints a line."""
    files = out / f"{name}.json", out / f"{name}.png"
    if start is not None:
        results["seconds"] = time.time() - start
    out.mkdir(parents=True, exist_ok=True)
    files[0].write_text(json.dumps(results, indent=1))
    figures.save(files[1], draw)
    if start is not None:
        print(f"\n{results['seconds']:.0f} s; written: {files[0]}, {files[1]}")


# ---- drawing, on top of rl_plugins.lab.compare.figures: cells are drawn with their intervals


def points(axis: Axes, x: Sequence[float], cells: Cells, name: str, i: int) -> None:
    """Series i: a point per value of x with its interval, joined by lines."""
    mean, half = _split(cells)
    axis.errorbar(x, mean, half, label=name, marker="o", markersize=3.5, capsize=2, **figures.line(i))


def band(axis: Axes, x: Sequence[float] | np.ndarray, cells: Cells, name: str, i: int) -> None:
    """Series i as a curve whose interval is a band around it."""
    mean, half = _split(cells)
    axis.plot(x, mean, label=name, **figures.line(i))
    axis.fill_between(x, mean - half, mean + half, color=figures.color(i), alpha=0.18, linewidth=0)


def runs_band(axis: Axes, x: Sequence[float] | np.ndarray, runs: Sequence[np.ndarray], name: str, i: int) -> None:
    """Series i as the mean curve of several runs, with the band of the interval."""
    band(axis, x, [summary(column) for column in np.stack(runs).T], name, i)


def across(axis: Axes, names: Iterable[str], cells: Cells, x: str) -> None:
    """Horizontal bars with their names on the left, in this order from the top."""
    mean, half = _split(cells)
    axis.barh(list(names), mean, xerr=half, **{**figures.bar(2), "hatch": ""})
    axis.locator_params(axis="x", nbins=6)
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    axis.set_xlabel(x)


def grouped(axis: Axes, groups: Iterable[str], series: Mapping[str, Cells]) -> None:
    """Bars side by side: a group per name, in each a bar per series."""
    pairs = {name: list(zip(*_split(cells), strict=True)) for name, cells in series.items()}
    figures.bars(axis, list(groups), pairs)


def named(axis: Axes, x: str, y: str, title: str = "") -> None:
    """Names of the axes with units, and the title of the panel above them."""
    figures.name_axes(axis, x, y)
    axis.set_title(title or " ", loc="left", pad=20 if title else 8, fontweight="bold")


def corner_legend(figure: Figure, axis: Axes) -> None:
    """The legend of one of three panels in the corner that they leave free."""
    figure.legend(*axis.get_legend_handles_labels(), loc="center", bbox_to_anchor=(0.76, 0.27), handlelength=2.6)


def _split(cells: Cells) -> tuple[np.ndarray, np.ndarray]:
    """Means, and half widths: 0 where one seed has none."""
    cells = list(cells)
    return np.array([c["mean"] for c in cells]), np.nan_to_num(np.array([c["ci95"] for c in cells]))
