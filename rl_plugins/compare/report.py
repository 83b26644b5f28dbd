"""From logs to figures: mean and 95 % interval over seeds, paired differences, curves, a short text."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rl_plugins.compare.plan import Arm, Comparison
from rl_plugins.compare.runs import read_log


@dataclass(frozen=True)
class Interval:
    """A mean with the half width of its 95 % interval (Student's t over seeds; NaN for one seed)."""

    mean: float
    half: float
    n: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        from scipy import stats

        x = np.asarray(values, dtype=float)
        x = x[~np.isnan(x)]
        if not len(x):
            return cls(math.nan, math.nan, 0)
        half = stats.t.ppf(0.975, len(x) - 1) * x.std(ddof=1) / math.sqrt(len(x)) if len(x) > 1 else math.nan
        return cls(float(x.mean()), float(half), len(x))

    def __str__(self) -> str:
        return f"{self.mean:.3f}" + ("" if math.isnan(self.half) else f" ± {self.half:.3f}")


EVALUATIONS = ("eval_", "val-")  # how names of values of an evaluation begin, in TRL and in verl


@dataclass(frozen=True)
class Curve:
    """One logged value of one arm: (turns,), (seeds, steps)."""

    steps: np.ndarray[Any, Any]
    values: np.ndarray[Any, Any]

    def last(self, share: float = 0.1) -> list[float]:
        """Mean over the last tenth of the points, per seed."""
        n = max(1, round(share * self.values.shape[1]))
        return [float(v) for v in np.nanmean(self.values[:, -n:], axis=1)]


def curve(comparison: Comparison, arm: Arm, name: str) -> Curve | None:
    """The value `name` of an arm over its seeds, at the steps all of them logged; None if it was never logged."""
    series = []
    for run in comparison.runs:
        if run.arm == arm:
            series.append({line["step"]: float(line[name]) for line in read_log(run) if line.get(name) is not None})
    steps = sorted(set.intersection(*(set(s) for s in series))) if series else []
    if not steps:
        return None
    return Curve(np.array(steps), np.array([[s[k] for k in steps] for s in series]))


def summarize(
    comparison: Comparison,
    metrics: Sequence[str],
    seconds: float | None = None,
    labels: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Everything the report says, as plain data.

    Args:
        metrics: logged values to compare; the first one is the main one. Values of an evaluation (`EVALUATIONS`) count
            at their last point, others as the mean over the last tenth of the run.
        labels: what a value is called in text and figure; default its name.
    """
    arms: dict[str, Any] = {}
    for arm in comparison.arms:
        entry: dict[str, Any] = {"methods": list(arm.methods), "metrics": {}}
        for name in metrics:
            found = curve(comparison, arm, name)
            if found is None:
                continue
            last = found.values[:, -1].tolist() if name.startswith(EVALUATIONS) else found.last()
            first = found.values[:, 0].tolist()
            interval = Interval.of(last)
            entry["metrics"][name] = {"start": first, "end": last, "mean": interval.mean, "half": interval.half}
        logs = [read_log(r) for r in comparison.runs if r.arm == arm]
        entry["seconds"] = [lines[-1]["seconds"] for lines in logs if lines]
        entry["tokens"] = [
            max((x["num_tokens"] for x in lines if "num_tokens" in x), default=math.nan) for lines in logs
        ]
        arms[arm.label] = entry
    base = arms[comparison.arms[0].label]
    for label, entry in arms.items():
        if label == comparison.arms[0].label:
            continue
        for name, value in entry["metrics"].items():
            if name in base["metrics"]:
                paired = np.subtract(value["end"], base["metrics"][name]["end"])
                difference = Interval.of(paired.tolist())
                value["difference"] = {"values": paired.tolist(), "mean": difference.mean, "half": difference.half}
    return {
        "baseline": comparison.arms[0].label,
        "seeds": list(comparison.seeds),
        "metrics": list(metrics),
        "labels": {m: (labels or {}).get(m, m) for m in metrics},
        "arms": arms,
        "notes": list(comparison.notes),
        "seconds": seconds,
    }


def write(
    comparison: Comparison,
    metrics: Sequence[str],
    seconds: float | None = None,
    labels: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Writes `summary.json`, `report.md` and `curves.png` into the comparison's folder."""
    summary = summarize(comparison, metrics, seconds, labels)
    comparison.out.mkdir(parents=True, exist_ok=True)
    (comparison.out / "summary.json").write_text(json.dumps(summary, indent=1))
    (comparison.out / "report.md").write_text(text(summary))
    draw(comparison, summary["labels"], comparison.out / "curves.png")
    return summary


def text(summary: dict[str, Any]) -> str:
    """The report in Markdown."""
    metrics, arms, labels = summary["metrics"], summary["arms"], summary["labels"]
    shown = [m for m in metrics if any(m in a["metrics"] for a in arms.values())]
    lines = [
        f"# {' against '.join([' and '.join(k for k in arms if k != summary['baseline']), summary['baseline']])}",
        "",
        *(f"{n}" for n in summary["notes"]),
        "",
        f"Mean over seeds {', '.join(map(str, summary['seeds']))} with 95 % interval (Student's t).",
        "",
    ]
    lines += ["| | " + " | ".join(labels[m] for m in shown) + " | tokens | seconds |", "|---" * (len(shown) + 3) + "|"]
    for label, arm in arms.items():
        cells = []
        for m in shown:
            v = arm["metrics"].get(m)
            cells.append(str(Interval(v["mean"], v["half"], len(v["end"]))) if v else "-")
        tokens, seconds = np.nanmean(arm["tokens"]), np.mean(arm["seconds"]) if arm["seconds"] else math.nan
        lines.append(f"| {label} | {' | '.join(cells)} | {tokens:,.0f} | {seconds:.1f} |")
    lines += ["", f"Each arm minus {summary['baseline']}, paired by seed:", ""]
    for label, arm in arms.items():
        found = [(m, arm["metrics"][m]["difference"]) for m in shown if "difference" in arm["metrics"].get(m, {})]
        lines += [f"- {label}, {labels[metric]}: {_verdict(difference)}" for metric, difference in found]
    lines += ["", "![curves](curves.png)", ""]
    return "\n".join(lines)


def _verdict(difference: dict[str, Any]) -> str:
    interval = Interval(difference["mean"], difference["half"], len(difference["values"]))
    if math.isnan(interval.half):
        judged = "one seed says nothing about chance; run more"
    elif abs(interval.mean) > interval.half:
        judged = "more than chance over these seeds"
    else:
        judged = "not told apart from chance with these seeds"
    return f"{interval}, {judged}."


def draw(comparison: Comparison, metrics: Mapping[str, str], file: Path) -> None:
    """One panel per metric (name: label): mean over seeds, thin lines for the seeds; the 95 % interval of 3 or more."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    found = {m: {a.label: curve(comparison, a, m) for a in comparison.arms} for m in metrics}
    found = {m: c for m, c in found.items() if any(v is not None for v in c.values())}
    if not found:
        return
    figure, axes = plt.subplots(1, len(found), figsize=(5.2 * len(found), 3.8), squeeze=False, layout="constrained")
    for axis, (metric, curves) in zip(axes[0], found.items(), strict=True):
        for i, (label, c) in enumerate(curves.items()):
            if c is None:
                continue
            color, smooth = f"C{i}", c if metric.startswith(EVALUATIONS) else _smoothed(c)
            mean = np.nanmean(smooth.values, axis=0)
            axis.plot(smooth.steps, mean, color=color, label=label, lw=2)
            for seed in smooth.values:
                axis.plot(smooth.steps, seed, color=color, lw=0.5, alpha=0.4)
            half = np.array([Interval.of(v.tolist()).half for v in smooth.values.T])
            if len(smooth.values) > 2:  # of two seeds the interval is 9 times their distance: it would hide the curves
                axis.fill_between(smooth.steps, mean - half, mean + half, color=color, alpha=0.15, lw=0)
        axis.set(xlabel="optimizer step", title=metrics[metric])
        axis.grid(alpha=0.3)
    axes[0][0].legend()
    figure.savefig(file, dpi=130)
    plt.close(figure)


def _smoothed(c: Curve, points: int = 25) -> Curve:
    """Means over equal stretches, so that single noisy batches do not hide the course."""
    n = max(1, len(c.steps) // points)
    whole = len(c.steps) // n * n
    return Curve(c.steps[:whole].reshape(-1, n).mean(1), c.values[:, :whole].reshape(len(c.values), -1, n).mean(2))
