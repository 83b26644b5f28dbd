"""What the scripts in this folder share: their options, means over seeds with intervals, and the files of results."""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_plugins import cards
from rl_plugins.lab.compare import figures
from rl_plugins.lab.compare.report import Interval

torch.set_num_threads(1)  # The tensors are tiny.

Cells = Iterable[Mapping[str, float]]  # a mean over seeds with the half width of its interval each, as of `summary`
RECORDS = Path(cards.__file__).parent / "records"
_run = argparse.Namespace(seeds=0)  # the options of this run, for `save`


def arguments(description: str, seeds: int) -> argparse.Namespace:
    """The options of a script: seeds and folders of results. A description of several lines is kept as it is."""
    layout = argparse.RawDescriptionHelpFormatter if "\n" in description else argparse.HelpFormatter
    return parsed(argparse.ArgumentParser(description=description, formatter_class=layout), seeds)


def parsed(parser: argparse.ArgumentParser, seeds: int) -> argparse.Namespace:
    """The same for a script with options of its own."""
    parser.add_argument("--seeds", type=int, default=seeds)
    parser.add_argument("--out", type=Path, default=Path("evidence-results"))
    parser.add_argument(
        "--records",
        type=Path,
        help="folder of the records that cards and pages are made of; default: that of the package, or of --out where "
        f"there are fewer than {seeds} seeds",
    )
    args = parser.parse_args(namespace=_run)
    args.records = args.records or (RECORDS if args.seeds >= seeds else args.out / "records")
    return args


def summary(values: Sequence[float] | np.ndarray) -> dict[str, float]:
    """The mean over seeds and the half width of its 95 % t interval."""
    found = Interval.of(values)
    return {"mean": found.mean, "ci95": found.half}


def interval(values: Sequence[float] | np.ndarray) -> dict[str, Any]:
    """The same as `summary`, and the values of the seeds."""
    return {**summary(values), "seeds": [round(float(v), 6) for v in values]}


def save(
    out: Path,
    name: str,
    results: dict[str, Any],
    draw: Callable[[], Figure],
    start: float | None = None,
    records: Iterable[dict[str, Any]] = (),
    where: str = "",
) -> None:
    """Writes results, figure and records; the figure for light and for dark pages. With the time of the start, it also
    notes the seconds since then and prints a line.

    Args:
        where: anchor of the section of docs/evidence.md that the records are of.
    """
    files = out / f"{name}.json", out / f"{name}.png"
    if start is not None:
        results["seconds"] = time.time() - start
    out.mkdir(parents=True, exist_ok=True)
    files[0].write_text(json.dumps(results, indent=1))
    figures.save(files[1], draw)
    if found := list(records):
        write_records(
            _run.records / f"{name}.json", [record | {"seeds": _run.seeds, "where": where} for record in found]
        )
    if start is not None:
        print(f"\n{results['seconds']:.0f} s; written: {files[0]}, {files[1]}")


# ---- records, of which rl_plugins.cards.results makes what cards and pages say

Cell = (
    Mapping[str, Any] | Sequence[float] | float
)  # as of `summary`, or the values of the seeds, or one without interval


def record(
    method: str,
    claim: str,
    better: Literal["higher", "lower"],
    value: Cell | None = None,
    other: Cell | None = None,
    *,
    difference: Cell | None = None,
    scale: float = 1,
    **texts: Any,
) -> dict[str, Any]:
    """A record of one result of a method; see `rl_plugins.cards.results.Result` for what it says.

    Args:
        value, other: of the method and of its baseline. Without `difference` they count as independent means.
        difference: value minus other, paired by seed.
        scale: factor on all of them: 100 for percent.
        texts: baseline, unit, budget, note; `none=1`, if `difference` is a ratio.
    """
    found = [[] if cell is None else _rounded(cell, scale) for cell in (value, other, difference)]
    head = {"method": method, "claim": claim, "better": better, **texts}
    if found[0]:
        head |= {"value": found[0]}
    if found[1]:
        head |= {"other": found[1]}
    paired = {"paired": True} if found[2] and not texts.get("none") else {}
    return head | difference_of(*found) | paired


def minus(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, float]:
    """The difference of two cells of `interval`, paired by seed."""
    return summary([a - b for a, b in zip(one["seeds"], other["seeds"], strict=True)])


def difference_of(value: Sequence[float], other: Sequence[float], difference: Sequence[float] = ()) -> dict[str, float]:
    """Mean and interval of a difference: as given (mean and half-width, or mean and both ends), or of two independent
    means, if both have half-widths."""
    if len(difference) == 3:
        mean, low, high = difference
    elif len(difference) == 2:
        mean, low, high = difference[0], difference[0] - difference[1], difference[0] + difference[1]
    elif len(value) == 2 and len(other) == 2:
        mean, half = value[0] - other[0], math.hypot(value[1], other[1])
        low, high = mean - half, mean + half
    elif value and other and not difference:
        return {"mean": round(value[0] - other[0], 6)}
    else:
        return {"mean": difference[0]} if difference else {}
    return {"mean": round(mean, 6), "low": round(low, 6), "high": round(high, 6)}


def write_records(file: Path, records: Sequence[Mapping[str, Any]]) -> None:
    """A file of records, one a line."""
    file.parent.mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    file.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")


def _rounded(cell: Cell, scale: float) -> list[float]:
    """Mean and half-width to two digits of the latter; a mean alone to four; a mean and both ends to three."""
    if isinstance(cell, tuple):
        return [float(f"{x * scale:.3g}") for x in cell]
    if isinstance(cell, int | float | np.floating):
        return [float(f"{cell * scale:.4g}")]
    if not isinstance(cell, Mapping):
        cell = summary(cell)
    mean, half = cell["mean"] * scale, cell["ci95"] * scale
    if not math.isfinite(half):
        return [float(f"{mean:.4g}")]
    digits = 1 - math.floor(math.log10(half)) if half > 1e-6 else 6
    return [round(mean, digits), round(half, digits)]


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
