"""The figures of the bench, from the raw results: the matrix, GRPO in each task, and the curves of a method."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_plugins.lab.bench.claims import LOOKS, claims_of
from rl_plugins.lab.bench.differences import TOTALS
from rl_plugins.lab.bench.published import methods_run
from rl_plugins.lab.bench.results import Point, Results
from rl_plugins.lab.bench.tasks import METRICS, TASKS

Panel = tuple[str, str, Sequence[str]]
"""A task, a metric, and variants."""


def draw(results: Results, told: Mapping[str, Any], folder: Path) -> None:
    """The matrix, the curves of GRPO per task and those of every method, each for light and dark pages.

    Args:
        told: the summary of the results.
    """
    from rl_plugins.lab.compare import figures

    if told["matrix"]:
        figures.save(folder / "matrix.png", lambda: _draw_matrix(told))
    tasks = [c for c in TASKS if len(results.seeds(c, "grpo")) >= LOOKS[0]]
    if tasks:
        wanted = [(c, TASKS[c].metric, ["grpo"]) for c in tasks]
        figures.save(folder / "baseline.png", lambda: _draw_curves(results, wanted))
    for method in methods_run(told):
        draw_method(results, method, folder / f"{method}.png")


def draw_method(results: Results, variant: str, file: Path) -> bool:
    """The curves of a method's claims beside what they are compared with, or of any variant beside GRPO in each task.

    Returns:
        Whether there was something to draw.
    """
    from rl_plugins.lab.compare import figures

    wanted = [
        (task, metric, variants)
        for task, metric, variants in panels_of(results, variant)
        if all(_curves(results, task, a, metric) for a in variants)
    ]
    if wanted:
        figures.save(file, lambda: _draw_curves(results, wanted))
    return bool(wanted)


def panels_of(results: Results, variant: str) -> list[Panel]:
    """What is drawn of a variant: its claims, then the other tasks in which it ran."""
    found: dict[tuple[str, str, str], Panel] = {}
    for c in claims_of(variant):
        if c.task and c.metric not in TOTALS:
            found.setdefault((c.task, c.metric, c.label), (c.task, c.metric, [c.than, c.label]))
    for task in TASKS.values():
        if results.seeds(task.name, variant) and not any(key[0] == task.name for key in found):
            found[task.name, task.metric, variant] = (task.name, task.metric, ["grpo", variant])
    return list(found.values())


def _curves(results: Results, task: str, variant: str, metric: str) -> list[list[Point]]:
    """Of every seed that has the metric."""
    runs = [
        results.runs[task, variant, seed].curves.get(METRICS[metric][0], []) for seed in results.seeds(task, variant)
    ]
    return [run for run in runs if run]


def _draw_matrix(told: Mapping[str, Any]) -> Any:
    import matplotlib
    from matplotlib.figure import Figure

    tasks = [c for c in TASKS if any(p["task"] == c for p in told["matrix"])]
    variants = sorted({p["variant"] for p in told["matrix"]})
    by = {(p["variant"], p["task"]): p for p in told["matrix"]}
    size = np.full((len(variants), len(tasks)), np.nan)
    figure = Figure(figsize=(2.4 + max(3.0, 0.62 * len(tasks)), 1.4 + 0.24 * len(variants)), layout="constrained")
    axis = figure.subplots()
    for i, variant in enumerate(variants):
        for j, task in enumerate(tasks):
            place = by.get((variant, task))
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
    axis.set_xticks(range(len(tasks)), tasks, rotation=45, ha="right", fontsize=7)
    axis.set_yticks(range(len(variants)), [shown_variant(variant) for variant in variants], fontsize=7)
    axis.grid(False)
    figure.colorbar(shown, ax=axis, shrink=0.5, label="difference from GRPO (* told apart)")
    return figure


def shown_variant(variant: str) -> str:
    """A variant in a figure: options are cut short."""
    name, _, options = variant.partition("@")
    return f"{name} @ {len(options.split(','))} options" if len(options) > 24 else variant


def _draw_curves(results: Results, wanted: Sequence[Panel]) -> Any:
    from rl_plugins.lab.compare.figures import color, line, name_axes, panels
    from rl_plugins.lab.compare.report import Interval

    figure, axes = panels(len(wanted))
    for axis, (task, metric, variants) in zip(axes, wanted, strict=False):
        label = METRICS[metric][1]
        for i, variant in enumerate(variants):
            by_step = [{cost["steps"]: value for cost, value in run} for run in _curves(results, task, variant, metric)]
            steps = sorted(set.intersection(*map(set, by_step)))
            of = [Interval.of([values[step] for values in by_step]) for step in steps]
            mean, half = np.array([x.mean for x in of]), np.nan_to_num(np.array([x.half for x in of]))
            axis.plot(steps, mean, label=shown_variant(variant), **line(i))
            axis.fill_between(steps, mean - half, mean + half, color=color(i), alpha=0.18, linewidth=0)
        name_axes(axis, "optimizer steps", textwrap.fill(f"{task}: {label.split(' (')[0]}", 38))
        axis.legend(frameon=False, fontsize=7)
    return figure
