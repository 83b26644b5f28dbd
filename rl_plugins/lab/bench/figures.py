"""The figures of the bench: all claims with their intervals, GRPO in each task, and the curves of a method."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_plugins.cards.claims import measured
from rl_plugins.lab.bench.claims import claims_of
from rl_plugins.lab.bench.differences import ENOUGH, TOTALS
from rl_plugins.lab.bench.page import SECTIONS, section_of
from rl_plugins.lab.bench.published import methods_run
from rl_plugins.lab.bench.results import Point, Results
from rl_plugins.lab.bench.tasks import METRICS, TASKS

Panel = tuple[str, str, Sequence[str]]
"""A task, a metric, and variants."""
MARKERS = {
    "": ("o", "to what the claim names"),
    "tokens": ("s", "at equal tokens"),
    "control": ("D", "to the host's way"),
}


def draw(results: Results, told: Mapping[str, Any], folder: Path) -> None:
    """The claims, the curves of GRPO per task and those of every method, each for light and dark pages.

    Args:
        told: the summary of the results.
    """
    from rl_plugins.lab.compare import figures

    figures.save(folder / "claims.png", lambda: _draw_claims(told))
    tasks = [c for c in TASKS if len(results.seeds(c, "grpo")) >= ENOUGH]
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


def _draw_claims(told: Mapping[str, Any]) -> Any:
    """A line for each claim that was run: its differences with their intervals, in units of what matters."""
    from matplotlib.figure import Figure

    from rl_plugins.lab.compare.figures import WIDTH, color

    claims = [c for key in SECTIONS for c in told["claims"] if "mean" in c and section_of(c) == key][::-1]
    figure = Figure(figsize=(WIDTH, 1.2 + 0.19 * len(claims)), layout="constrained")
    axis = figure.subplots()
    axis.axvspan(-1, 1, color=color(0), alpha=0.15, linewidth=0)
    axis.axvline(0, color=color(0), linewidth=1)
    for i, (name, (marker, label)) in enumerate(MARKERS.items(), 1):
        of = [(y - 0.22 * (i - 2), measured(c)[name], c) for y, c in enumerate(claims) if name in measured(c)]
        units = [c["least"] * (1 if c["better"] == "higher" else -1) for _, _, c in of]
        at = [d["mean"] / unit for (_, d, _), unit in zip(of, units, strict=True)]
        half = [abs((d["high"] - d["low"]) / unit) / 2 for (_, d, _), unit in zip(of, units, strict=True)]
        y = [place for place, _, _ in of]
        axis.errorbar(at, y, xerr=half, fmt=marker, markersize=3.5, linewidth=1, color=color(i), label=label)
    names = [f"{shown_variant(c.get('variant') or c['method'])}, {c['task']}: {c['metric']}" for c in claims]
    axis.set_yticks(range(len(claims)), names, size=6.5)
    axis.set_ylim(-1, len(claims))
    axis.set_xlabel("difference / smallest that matters; right of zero the method is better")
    figure.legend(loc="outside upper center", ncols=3)
    return figure


def shown_variant(variant: str) -> str:
    """A variant in a figure: of many options the first."""
    return variant if len(variant) < 36 else f"{variant.partition(',')[0]}, …"


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
