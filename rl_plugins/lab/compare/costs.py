"""What a run has cost so far, in every cost unit, and the point at which a budget in one of them ends it.

Hosts log totals since the start of the run under names that are the same everywhere. All variants run the same
config to its end. A budget is then the most of a cost unit that every variant reached, so no run is repeated for
another cost unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.compare.plan import Comparison, PlannedRun
from rl_plugins.lab.compare.runs import is_finished, read_log

# key -> name in the logs, and what a reader sees
COSTS: Mapping[str, tuple[str, str]] = {
    "steps": ("step", "optimizer steps"),
    "rows_made": ("rl_plugins/rows_made", "rows made"),
    "rows_trained": ("rl_plugins/rows_trained_total", "rows trained"),
    "model_passes": ("rl_plugins/model_passes_total", "model passes"),
    "transitions_trained": ("rl_plugins/transitions_trained_total", "transitions trained"),
    "tokens_decoded": ("rl_plugins/tokens_decoded", "tokens decoded"),
    "tokens_read": ("rl_plugins/tokens_read", "tokens read"),
    "engine_calls": ("rl_plugins/engine_calls", "engine calls"),
    "engine_seconds": ("rl_plugins/engine_seconds", "engine time (s)"),
    "seconds": ("seconds", "time (s)"),
}
OF_SAMPLES = ("model_passes", "transitions_trained")  # counted by the diffusion trainer, and by no other
OF_TEXT = ("tokens_decoded", "tokens_read", "engine_calls", "engine_seconds")
COST_UNITS = ("steps", "rows_trained", "tokens_decoded", "engine_seconds", "model_passes")


def require(comparison: Comparison, cost_unit: str) -> None:
    """Finished runs have logged the cost unit.

    Raises:
        ConfigError: one did not, because an earlier version made it.
    """
    for run in comparison.runs:
        if cost_unit != "steps" and is_finished(run) and (lines := read_log(run)):
            _require(run, lines, cost_unit)


def _require(run: PlannedRun, lines: Sequence[Mapping[str, Any]], cost_unit: str) -> None:
    name = COSTS[cost_unit][0]
    if not any(name in line for line in lines):
        raise ConfigError(
            f"{run.log_file} has no `{name}`, which --budget {cost_unit} needs: the run of {run.variant.label} with "
            f"seed {run.seed} did not count it, as runs of earlier versions of rl-plugins. Remove {run.folder} and "
            f"give the same command again, which repeats this run, or give --budget steps."
        )


@dataclass(frozen=True)
class Course:
    """A log with what the run had cost at every line.

    Args:
        lines: of the log.
        costs: per line, key of `COSTS` -> total so far; NaN where the host did not count it.
    """

    lines: tuple[Mapping[str, Any], ...]
    costs: tuple[Mapping[str, float], ...]

    @classmethod
    def of(cls, lines: Sequence[Mapping[str, Any]]) -> Course:
        """A total that a line leaves out, as those of evaluations do, is read at its step between the totals before and
        after, in proportion. After the last total it stays the same."""
        totals: dict[str, list[float]] = {}
        for key, (name, _) in COSTS.items():
            known = [(float(line["step"]), float(line[name])) for line in lines if name in line]
            if known:
                steps, values = zip((0.0, 0.0), *known, strict=True)
                read = np.interp([float(line["step"]) for line in lines], steps, values)
                totals[key] = [float(line.get(name, at)) for line, at in zip(lines, read, strict=True)]
            else:
                totals[key] = [math.nan] * len(lines)
        costs = tuple({key: values[i] for key, values in totals.items()} for i in range(len(lines)))
        return cls(tuple(lines), costs)

    @property
    def total(self) -> Mapping[str, float]:
        return self.costs[-1]

    def series(self, name: str, cost_unit: str) -> list[tuple[float, float]]:
        """(cost, value) of every line that has the value."""
        return [
            (cost[cost_unit], float(line[name]))
            for line, cost in zip(self.lines, self.costs, strict=True)
            if line.get(name) is not None and not math.isnan(float(line[name]))
        ]

    def at(self, cost_unit: str, budget: float) -> Mapping[str, float]:
        """All costs at the last line within the budget."""
        return [cost for cost in self.costs if cost[cost_unit] <= budget or cost is self.costs[0]][-1]


@dataclass(frozen=True)
class Cut:
    """Where all runs of a comparison are cut.

    Args:
        cost_unit: of `COST_UNITS`.
        courses: per run, (variant's label, seed) -> its log with costs.
        of: seed -> the largest total of the cost unit that every variant reached with this seed.
    """

    cost_unit: str
    courses: Mapping[tuple[str, int], Course]
    of: Mapping[int, float]

    @classmethod
    def read(cls, comparison: Comparison, cost_unit: str) -> Cut:
        """From the logs as they are.

        Raises:
            ConfigError: a log without the cost unit.
        """
        courses = {}
        for run in comparison.runs:
            if lines := read_log(run):
                if cost_unit != "steps":
                    _require(run, lines, cost_unit)
                courses[run.variant.label, run.seed] = Course.of(lines)
        of = {}
        for seed in comparison.seeds:
            totals = [course.total[cost_unit] for (_, s), course in courses.items() if s == seed]
            if totals:
                of[seed] = min(totals)
        return cls(cost_unit, courses, of)

    def runs_of(self, label: str) -> list[tuple[Course, float]]:
        """The runs of a variant in the order of the seeds, each with its budget."""
        return [(self.courses[label, s], budget) for s, budget in self.of.items() if (label, s) in self.courses]
