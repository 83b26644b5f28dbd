"""The figures of the bench, from the raw results: the matrix, GRPO in each cell, and the curves of a method."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_plugins.lab.bench.cells import CELLS, METRICS
from rl_plugins.lab.bench.claims import LOOKS, claims_of
from rl_plugins.lab.bench.differences import TOTALS
from rl_plugins.lab.bench.published import methods_run
from rl_plugins.lab.bench.results import Point, Results

Panel = tuple[str, str, Sequence[str]]
"""A cell, a metric, and arms."""


def draw(results: Results, told: Mapping[str, Any], folder: Path) -> None:
    """The matrix, the curves of GRPO per cell and those of every method, each for light and dark pages.

    Args:
        told: the summary of the results.
    """
    from rl_plugins.lab.compare import figures

    folder.mkdir(parents=True, exist_ok=True)
    if told["matrix"]:
        figures.save(folder / "matrix.png", lambda: _draw_matrix(told))
    cells = [c for c in CELLS if len(results.seeds(c, "grpo")) >= LOOKS[0]]
    if cells:
        wanted = [(c, CELLS[c].metric, ["grpo"]) for c in cells]
        figures.save(folder / "baseline.png", lambda: _draw_curves(results, wanted))
    for method in methods_run(told):
        draw_method(results, method, folder / f"{method}.png")


def draw_method(results: Results, arm: str, file: Path) -> bool:
    """The curves of a method's claims beside what they are compared with, or of any arm beside GRPO in each cell.

    Returns:
        Whether there was something to draw.
    """
    from rl_plugins.lab.compare import figures

    wanted = [
        (cell, metric, arms)
        for cell, metric, arms in panels_of(results, arm)
        if all(_curves(results, cell, a, metric) for a in arms)
    ]
    if wanted:
        file.parent.mkdir(parents=True, exist_ok=True)
        figures.save(file, lambda: _draw_curves(results, wanted))
    return bool(wanted)


def panels_of(results: Results, arm: str) -> list[Panel]:
    """What is drawn of an arm: its claims, then the other cells in which it ran."""
    found: dict[tuple[str, str, str], Panel] = {}
    for c in claims_of(arm):
        if c.cell and c.metric not in TOTALS:
            found.setdefault((c.cell, c.metric, c.label), (c.cell, c.metric, [c.than, c.label]))
    for cell in CELLS.values():
        if results.seeds(cell.name, arm) and not any(key[0] == cell.name for key in found):
            found[cell.name, cell.metric, arm] = (cell.name, cell.metric, ["grpo", arm])
    return list(found.values())


def _curves(results: Results, cell: str, arm: str, metric: str) -> list[list[Point]]:
    """Of every seed that has the metric."""
    runs = [results.runs[cell, arm, seed].curves.get(METRICS[metric][0], []) for seed in results.seeds(cell, arm)]
    return [run for run in runs if run]


def _draw_matrix(told: Mapping[str, Any]) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    cells = [c for c in CELLS if any(p["cell"] == c for p in told["matrix"])]
    arms = sorted({p["arm"] for p in told["matrix"]})
    by = {(p["arm"], p["cell"]): p for p in told["matrix"]}
    size = np.full((len(arms), len(cells)), np.nan)
    figure = Figure(figsize=(2.4 + max(3.0, 0.62 * len(cells)), 1.4 + 0.24 * len(arms)), layout="constrained")
    axis = figure.subplots()
    for i, arm in enumerate(arms):
        for j, cell in enumerate(cells):
            place = by.get((arm, cell))
            if place is None:
                continue
            size[i, j] = place.get("mean", np.nan)
            apart = place["mark"] in ("better", "worse")
            text = f"{place['mean']:+.2f}{'*' if apart else ''}" if "mean" in place else "failed"
            weight = "bold" if apart else "normal"
            # dark text on pale places, also on dark pages; a place without a number has the page's own colour
            written: dict[str, Any] = {"color": "#111111"} if "mean" in place else {}
            axis.text(j, i, text, ha="center", va="center", fontsize=6.5, fontweight=weight, **written)
    # Purple is better and orange is worse; the sign and the star say the same without colour.
    shades = matplotlib.colormaps["PuOr"].resampled(13)  # few, so that a small file keeps them all
    shown = axis.imshow(size, cmap=shades, vmin=-0.3, vmax=0.3, aspect="auto")
    axis.set_xticks(range(len(cells)), cells, rotation=45, ha="right", fontsize=7)
    axis.set_yticks(range(len(arms)), [shown_arm(arm) for arm in arms], fontsize=7)
    axis.grid(False)
    figure.colorbar(shown, ax=axis, shrink=0.5, label="difference from GRPO (* told apart)")
    return figure


def shown_arm(arm: str) -> str:
    """An arm in a figure: options are cut short."""
    name, _, options = arm.partition("@")
    return f"{name} @ {len(options.split(','))} options" if len(options) > 24 else arm


def _draw_curves(results: Results, wanted: Sequence[Panel]) -> Any:
    from rl_plugins.lab.compare.figures import color, line, name_axes, panels
    from rl_plugins.lab.compare.report import Interval

    figure, axes = panels(len(wanted))
    for axis, (cell, metric, arms) in zip(axes, wanted, strict=False):
        label = METRICS[metric][1]
        for i, arm in enumerate(arms):
            by_step = [{cost["steps"]: value for cost, value in run} for run in _curves(results, cell, arm, metric)]
            steps = sorted(set.intersection(*map(set, by_step)))
            of = [Interval.of([values[step] for values in by_step]) for step in steps]
            mean, half = np.array([x.mean for x in of]), np.nan_to_num(np.array([x.half for x in of]))
            axis.plot(steps, mean, label=shown_arm(arm), **line(i))
            axis.fill_between(steps, mean - half, mean + half, color=color(i), alpha=0.18, linewidth=0)
        name_axes(axis, "optimizer steps", textwrap.fill(f"{cell}: {label.split(' (')[0]}", 38))
        axis.legend(frameon=False, fontsize=7)
    return figure
