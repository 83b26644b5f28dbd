"""From logs to figures: mean and 95 % interval over seeds at equal cost, paired differences, curves, a short text."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import write_text
from rl_plugins.lab.compare import agents
from rl_plugins.lab.compare.costs import COSTS, OF_SAMPLES, OF_TEXT, Course, Cut
from rl_plugins.lab.compare.plan import Comparison


@dataclass(frozen=True)
class Interval:
    """A mean with the half width of its 95 % interval (Student's t over seeds; NaN for one seed).

    A metric that is counted, right answers among 64 for example, has steps. Seeds with the same value differ by less
    than a step, so their standard deviation is taken as at least that."""

    mean: float
    half: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float], resolution: float = 0.0) -> Interval:
        from scipy import stats

        x = np.asarray(values, dtype=float)
        x = x[~np.isnan(x)]
        if not len(x):
            return cls(math.nan, math.nan, 0)
        if len(x) == 1:
            return cls(float(x[0]), math.nan, 1)
        spread = max(float(x.std(ddof=1)), resolution)
        return cls(float(x.mean()), float(stats.t.ppf(0.975, len(x) - 1)) * spread / math.sqrt(len(x)), len(x))

    def __str__(self) -> str:
        largest = max((abs(x) for x in (self.mean, self.half) if math.isfinite(x)), default=0.0)
        places = max(3, 2 - math.floor(math.log10(largest))) if largest > 1e-9 else 3  # 3 digits of small numbers
        return f"{self.mean:.{places}f}" + ("" if math.isnan(self.half) else f" ± {self.half:.{places}f}")


SEEDS = 3  # fewer decide nothing
EVALUATIONS = ("eval_", "val-")  # how names of values of an evaluation begin, in TRL and in verl
LAST = 0.1  # share of the budget over which a value of training is averaged
POINTS = 25  # of a curve
LABELS = {
    "eval_reward": "reward, held out",
    "reward": "reward, in training",
    "frac_reward_zero_std": "rollouts in groups of equal rewards (share)",
}
_PART = re.compile(r"(eval_)?rewards/(.+)/mean")


def label_of(name: str) -> str:
    """What a logged value is called in text and figure."""
    if match := _PART.fullmatch(name):
        return f"reward `{match[2]}`, {'held out' if match[1] else 'in training'}"
    return LABELS.get(name, name)


def found_metrics(comparison: Comparison) -> list[str]:
    """The values a report shows unless the user names some: the reward on held-out prompts, the reward in training, and
    each reward function of both. A function that is the whole reward is not shown twice."""
    series: dict[str, list[Any]] = {}
    for course in Cut.read(comparison, "steps").courses.values():
        for line in course.lines:
            for name, value in line.items():
                if name in ("reward", "eval_reward") or _PART.fullmatch(name):
                    series.setdefault(name, []).append((line["step"], value))
    names = []
    for total in ("eval_reward", "reward"):
        parts = [n for n in series if _PART.fullmatch(n) and n.startswith("eval_") == total.startswith("eval_")]
        names += [n for n in [total, *sorted(parts)] if n in series and (n == total or series[n] != series.get(total))]
    return names


def ends(course: Course, name: str, cost_unit: str, budget: float) -> float:
    """A value where the budget ends a run; NaN if it was not logged by then.

    Evaluations are read between the two that enclose the budget, in proportion. Others are means over the last tenth of
    the budget, or the last one within it.
    """
    series = course.series(name, cost_unit)
    if not series or series[0][0] > budget:
        return math.nan
    if name.startswith(EVALUATIONS):
        costs, values = zip(*series, strict=True)
        after = next((i for i, cost in enumerate(costs) if cost > budget), None)
        if after is None:
            return values[-1]
        share = (budget - costs[after - 1]) / (costs[after] - costs[after - 1])
        return values[after - 1] + share * (values[after] - values[after - 1])
    within = [value for cost, value in series if cost <= budget]
    late = [value for cost, value in series if (1 - LAST) * budget < cost <= budget]
    return float(np.mean(late)) if late else within[-1]


def resolution(cut: Cut, name: str, cost_unit: str) -> float:
    """The step of a metric that is counted, 1/64 for right answers among 64: the greatest number of which all
    differences of its values in all runs are multiples; 0 where it is no more than 1/10,000 of their range."""
    logged = [value for course in cut.courses.values() for _, value in course.series(name, cost_unit)]
    values = sorted({value for value in logged if math.isfinite(value)})
    span = values[-1] - values[0] if values else 0.0
    step = 0.0
    for gap in np.diff(values).tolist():
        while gap > 1e-6 * span:  # Euclid's rule; below that it is rounding
            step, gap = gap, math.fmod(step, gap)
            gap = 0.0 if step - gap < 1e-6 * span else gap
    return step if step > 1e-4 * span else 0.0


def is_flat(course: Course, name: str, cost_unit: str, budget: float) -> bool:
    """Whether a value was the same in the last tenth of the budget, ten times at least, so that equal values are no
    chance: nothing is learned there."""
    values = [value for cost, value in course.series(name, cost_unit) if cost <= budget]
    late = values[-max(10, round(LAST * len(values))) :]
    return len(late) >= 10 and max(late) == min(late)


def summarize(
    comparison: Comparison,
    metrics: Sequence[str],
    seconds: float | None = None,
    labels: Mapping[str, str] | None = None,
    cost_unit: str = "steps",
) -> dict[str, Any]:
    """Everything the report says, as plain data.

    Args:
        metrics: logged values to compare; the first one is the main one.
        seconds: that the runs took.
        labels: what a value is called in text and figure; default `label_of`.
        cost_unit: in which all variants have the same budget.

    Raises:
        ConfigError: a run has not logged the cost unit.
    """
    budget = Cut.read(comparison, cost_unit)
    _logged_by_some(budget, metrics)
    variants: dict[str, Any] = {}
    for variant in comparison.variants:
        runs = budget.runs_of(variant.label)
        seeds = [s for s in budget.of if (variant.label, s) in budget.courses]
        entry: dict[str, Any] = {
            "methods": list(variant.methods),
            "options": list(variant.options),
            "seeds": seeds,
            "metrics": {},
        }
        for name in metrics:
            end = [ends(course, name, cost_unit, b) for course, b in runs]
            if not end or any(map(math.isnan, end)):
                continue
            steps, start = zip(*(course.series(name, "steps")[0] for course, _ in runs), strict=True)
            interval = Interval.of(end)
            entry["metrics"][name] = {"start": [*start], "start_steps": [*steps], "end": end}
            entry["metrics"][name] |= {"mean": interval.mean, "half": interval.half}
        costs = {key: [course.at(cost_unit, b)[key] for course, b in runs] for key in COSTS}
        entry["costs"] = {key: values for key, values in costs.items() if not any(map(math.isnan, values))}
        entry["steps_in_all"] = [course.total["steps"] for course, _ in runs]
        entry["collapsed"] = [is_flat(course, "reward", cost_unit, b) for course, b in runs]
        variants[variant.label] = entry
    base = variants[comparison.variants[0].label]
    for label, entry in variants.items():
        if label == comparison.variants[0].label:
            continue
        for name, value in entry["metrics"].items():
            if name in base["metrics"]:
                theirs = dict(zip(base["seeds"], base["metrics"][name]["end"], strict=True))
                mine = zip(entry["seeds"], value["end"], strict=True)
                paired = [end - theirs[seed] for seed, end in mine if seed in theirs]
                difference = Interval.of(paired, resolution(budget, name, cost_unit))
                value["difference"] = {"values": paired, "mean": difference.mean, "half": difference.half}
    return {
        "baseline": comparison.variants[0].label,
        "seeds": list(comparison.seeds),
        "budget": {"cost_unit": cost_unit, "of": list(budget.of.values())},
        "metrics": list(metrics),
        "labels": {m: (labels or {}).get(m) or label_of(m) for m in metrics},
        "variants": variants,
        "agents": agents.measure(budget, metrics[0], ends) if metrics else {},
        "notes": list(comparison.notes),
        "seconds": seconds,
    }


def _logged_by_some(cut: Cut, metrics: Sequence[str]) -> None:
    """Raises ConfigError for a metric that no run has logged."""
    logged = {name for course in cut.courses.values() for line in course.lines for name in line}
    unknown = [name for name in metrics if name not in logged]
    if logged and unknown:
        names = ", ".join(sorted(logged - {"step", "max_steps", "seconds", "started"}))
        raise ConfigError(
            f"No run has logged {', '.join(unknown)}. The runs are kept: give the same command with --metric and one "
            f"of {names}."
        )


def write(
    comparison: Comparison,
    metrics: Sequence[str],
    seconds: float | None = None,
    labels: Mapping[str, str] | None = None,
    cost_unit: str = "steps",
) -> dict[str, Any]:
    """Writes `summary.json` and `report.md` into the comparison's folder, and `curves.png` and `curves-dark.png` if
    there is a curve to draw; `summary["files"]` names what was written."""
    summary = summarize(comparison, metrics, seconds, labels, cost_unit)
    curves = draw(comparison, summary["labels"], comparison.out / "curves.png", cost_unit)
    summary["files"] = [*(file.name for file in curves), "report.md", "summary.json"]
    write_text(comparison.out / "summary.json", json.dumps(_finite(summary), indent=1, allow_nan=False))
    write_text(comparison.out / "report.md", text(summary) + ("\n![curves](curves.png)\n" if curves else ""))
    return summary


def _finite(value: Any) -> Any:
    """null for NaN and infinity, which JSON does not know: the interval of one seed, a ratio that overflowed."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def text(summary: dict[str, Any], brief: bool = False) -> str:
    """The report in Markdown; `brief`, for a terminal: without notes, values before training and costs."""
    metrics, variants, labels, base = summary["metrics"], summary["variants"], summary["labels"], summary["baseline"]
    shown = [m for m in metrics if any(m in a["metrics"] for a in variants.values())]
    others = [label for label in variants if label != base]
    lines = [f"# {' against '.join([', '.join(others), base] if others else [base])}", ""]
    for note in [*(() if brief else summary["notes"]), *_budget(summary)]:
        lines += [note, ""]
    head = ["| | " + " | ".join(variants) + " |", "|---" * (len(variants) + 1) + "|"]
    lines += head
    for m in shown:
        found = [variant["metrics"].get(m) for variant in variants.values()]
        cells = [str(Interval(v["mean"], v["half"], len(v["end"]))) if v else "-" for v in found]
        if not brief and m.startswith(EVALUATIONS) and all(v and not any(v["start_steps"]) for v in found):
            before = [str(Interval.of(v["start"])) for v in found if v]
            lines.append(f"| {labels[m]}, before training | {' | '.join(before)} |")
        lines.append(f"| {labels[m]} | {' | '.join(cells)} |")
    lines += [] if brief else ["", *_costs(variants, head)]
    if found := summary["agents"]:
        label = labels[found["metric"]]
        lines += ["", *agents.text(found, label, lambda values: str(Interval.of(values)))]
    collapsed = [_collapse(label, variant) for label, variant in variants.items() if any(variant["collapsed"])]
    lines += ["", *collapsed] if collapsed else []
    if others:
        lines += ["", f"Each variant minus {base}, paired by seed:", ""]
    for label in others:
        for m in shown:
            if "difference" in variants[label]["metrics"].get(m, {}):
                lines.append(f"- {label}, {labels[m]}: {_verdict(variants[label], variants[base], m)}")
    return "\n".join([*lines, ""])


def _costs(variants: Mapping[str, Any], head: Sequence[str]) -> list[str]:
    """What the variants cost, a table."""
    samples = any("model_passes" in variant["costs"] for variant in variants.values())
    rows = [
        f"| {what} | {' | '.join(_cost(variant['costs'].get(key), key) for variant in variants.values())} |"
        for key, (_, what) in COSTS.items()
        if key not in (OF_TEXT if samples else OF_SAMPLES)
    ]
    return [
        "What it cost, mean over seeds (evaluations are not counted, except in the time of TRL):",
        "",
        *head,
        *rows,
    ]


def _budget(summary: dict[str, Any]) -> list[str]:
    """The budget, where it cuts the variants, and what the numbers are."""
    cost_unit, of = summary["budget"]["cost_unit"], summary["budget"]["of"]
    lines = []
    if of:
        cut = {
            label: (float(np.mean(variant["costs"]["steps"])), float(np.mean(variant["steps_in_all"])))
            for label, variant in summary["variants"].items()
            if variant["steps_in_all"]
        }
        lines.append(
            f"Budget: {_cost(of, cost_unit)} {COSTS[cost_unit][1]} per run, the most that every variant reached with "
            f"the same seed. Every variant is read there."
        )
        short = {label: pair for label, pair in cut.items() if pair[0] < pair[1]}
        if short:
            places = "; ".join(f"{label} at step {round(at, 1):g} of {total:g}" for label, (at, total) in short.items())
            lines[0] += (
                f" Cut: {places}. A learning-rate schedule that depends on the number of steps of the run is not at "
                f"its end where a variant is cut."
            )
    seeds = summary["seeds"]
    if len(seeds) == 1:
        lines.append(f"One seed ({seeds[0]}): it says nothing about chance. Run more with --seeds.")
    else:
        lines.append(f"Mean over seeds {', '.join(map(str, seeds))} with 95 % interval (Student's t).")
    if 1 < len(seeds) < SEEDS:
        lines.append(f"{len(seeds)} seeds decide nothing. Run {SEEDS} or more with --seeds.")
    return lines


def _cost(values: Sequence[float] | None, key: str) -> str:
    if not values:
        return "not counted"
    mean = float(np.mean(values))
    return f"{mean:,.0f}" if "seconds" not in key else f"{mean:,.1f}" if mean >= 1 else f"{mean:.2g}"


def _collapse(label: str, variant: dict[str, Any]) -> str:
    n, of = sum(variant["collapsed"]), len(variant["collapsed"])
    return (
        f"{label} has collapsed in {n} of {of} runs: the reward in training no longer changes. If it is the highest "
        f"possible reward, the task is solved."
    )


def _verdict(variant: dict[str, Any], base: dict[str, Any], metric: str) -> str:
    difference = variant["metrics"][metric]["difference"]
    interval = Interval(difference["mean"], difference["half"], len(difference["values"]))
    if all(variant["collapsed"]) and all(base["collapsed"]) and interval.mean == 0:
        return "0, both have collapsed."
    if interval.n < SEEDS:
        return f"{interval}."  # said once, above
    if abs(interval.mean) <= interval.half:
        return f"{interval}, no significant difference from chance with these seeds."
    return f"{interval}, more than chance over these seeds."


@dataclass(frozen=True)
class Curve:
    """One logged value of one variant over what it cost: (points,), (seeds, points)."""

    costs: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]


def curve(runs: Sequence[tuple[Course, float]], name: str, cost_unit: str) -> Curve | None:
    """The value `name` of a variant up to its budget, over costs that all of its runs reached; None if one has not
    logged it. Evaluations are joined by straight lines, other values are means over equal stretches of cost."""
    series = [[(c, v) for c, v in course.series(name, cost_unit) if c <= budget] for course, budget in runs]
    if not series or not all(series):
        return None
    low, high = max(s[0][0] for s in series), min(s[-1][0] for s in series)
    if name.startswith(EVALUATIONS):
        costs = sorted({c for s in series for c, _ in s if low <= c <= high})
        values = [np.interp(costs, [c for c, _ in s], [v for _, v in s]) for s in series]
        return Curve(np.array(costs), np.array(values))
    edges = np.linspace(low, high, min(POINTS, min(map(len, series))) + 1)
    stretches = [np.digitize([c for c, _ in s], edges[1:-1], right=True) for s in series]
    means = [
        [_mean([v for (c, v), p in zip(s, place, strict=True) if p == k and c <= high]) for k in range(len(edges) - 1)]
        for s, place in zip(series, stretches, strict=True)
    ]
    return Curve((edges[:-1] + edges[1:]) / 2, np.array(means))


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def draw(comparison: Comparison, metrics: Mapping[str, str], file: Path, cost_unit: str = "steps") -> list[Path]:
    """One panel per metric (name: label): mean over seeds, thin lines for the seeds; the 95 % interval of 3 or more.

    Returns:
        The files, light and dark; none if no variant has a curve. Then older ones are removed.
    """
    from rl_plugins.lab.compare import figures

    budget = Cut.read(comparison, cost_unit)
    found = {m: {a.label: curve(budget.runs_of(a.label), m, cost_unit) for a in comparison.variants} for m in metrics}
    found = {m: c for m, c in found.items() if any(v is not None for v in c.values())}
    if not found:
        for old in (file, file.with_stem(f"{file.stem}-dark")):
            old.unlink(missing_ok=True)
        return []

    def drawn() -> Any:
        figure, axes = figures.panels(len(found))
        for axis, (metric, curves) in zip(axes, found.items(), strict=True):
            for i, (label, c) in enumerate(curves.items()):
                if c is None:
                    continue
                seen = ~np.isnan(c.values).all(axis=0)
                costs, values = c.costs[seen], c.values[:, seen]
                mean = np.nanmean(values, axis=0)
                axis.plot(costs, mean, label=label, **figures.line(i))
                if len(values) > 1:
                    for seed in values:
                        axis.plot(costs, seed, color=figures.color(i), lw=0.5, alpha=0.4)
                if len(values) > 2:  # of two seeds the interval is 9 times their distance: it would hide the curves
                    half = np.array([Interval.of(v.tolist()).half for v in values.T])
                    axis.fill_between(costs, mean - half, mean + half, color=figures.color(i), alpha=0.13, lw=0)
            figures.name_axes(axis, COSTS[cost_unit][1], metrics[metric].replace("`", ""))
        figures.name_lines(figure)
        return figure

    return [*figures.save(file, drawn)]
