"""The raw results: `runs.parquet`, a record per run, and `curves.parquet`, its values over the course of training.

Columns of `runs`: task, variant, seed, host, `task_fingerprint` and `variant_fingerprint` (results with another one are
made again), versions (JSON), date, error. Columns of `curves`: task, variant, seed, host, then `step`, the costs so far
(`rows_trained`, `tokens_decoded`), `name` and `value`. Values of training are means since the evaluation before. What
the methods of a variant log is kept, too, from 2026-11-27 on.
"""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import whole
from rl_plugins.lab.bench.tasks import COST_UNITS, METRICS, TASKS, fingerprint_of
from rl_plugins.lab.bench.variants import BenchVariant
from rl_plugins.lab.compare.costs import Course

SEARCH_FROM, CONFIRM_FROM = 100, 200  # seeds of the search for stacks, and of its confirmation
KEPT = (*(name for name, _ in METRICS.values()), "reward", "completions/mean_length", "grad_norm")
RUNS = pa.schema(
    {
        "task": pa.string(),
        "variant": pa.string(),
        "seed": pa.int32(),
        "host": pa.string(),
        "task_fingerprint": pa.string(),
        "variant_fingerprint": pa.string(),
        "versions": pa.string(),
        "date": pa.string(),
        "error": pa.string(),
    }
)
CURVES = pa.schema(
    {
        "task": pa.string(),
        "variant": pa.string(),
        "seed": pa.int32(),
        "host": pa.string(),
        "step": pa.int32(),
        "rows_trained": pa.float64(),
        "tokens_decoded": pa.float64(),
        "name": pa.string(),
        "value": pa.float64(),
    }
)

Point = tuple[Mapping[str, float], float]
"""Costs by cost_unit, and a value."""


@cache
def variant_fingerprint(label: str) -> str:
    """Changes with the options and parameters of a variant."""
    variant = BenchVariant.of(label)
    return fingerprint_of(variant.label, variant.methods, variant.options, variant.params)


@dataclass
class BenchRun:
    """One run.

    Args:
        record: of the table of runs.
        curves: name of a value -> its points, in the order of training.
    """

    record: dict[str, Any]
    curves: dict[str, list[Point]] = field(default_factory=dict)

    @property
    def error(self) -> str:
        return str(self.record["error"])

    @classmethod
    def of(cls, task: str, variant: str, seed: int, lines: Sequence[Mapping[str, Any]], error: str = "") -> BenchRun:
        """From the lines that the trainer logged."""
        names = ("trl", "torch", "transformers", "rl-plugins")
        versions = {**{name: version(name) for name in names}, "python": platform.python_version()}
        record = {
            "task": task,
            "variant": variant,
            "seed": seed,
            "host": "trl",
            "task_fingerprint": TASKS[task].fingerprint,
            "variant_fingerprint": variant_fingerprint(variant),
            "versions": json.dumps(versions),
            "date": datetime.date.today().isoformat(),
            "error": error,
        }
        return cls(record, {} if error else _curves(lines, BenchVariant.of(variant).parts))


def _curves(lines: Sequence[Mapping[str, Any]], methods: Sequence[str]) -> dict[str, list[Point]]:
    course = Course.of(lines)
    marks = sorted({int(line["step"]) for line in lines if any(k.startswith("eval_") for k in line)})
    ends = marks[1:] or [max(int(line["step"]) for line in lines)]
    out: dict[str, list[Point]] = {}
    own = dict.fromkeys(k for line in lines for k in line if k.partition("/")[0] in methods)
    for name in (*KEPT, *own):
        found = [
            (int(line["step"]), {c: float(cost.get(c, math.nan)) for c in COST_UNITS}, float(line[name]))
            for line, cost in zip(course.lines, course.costs, strict=True)
            if isinstance(line.get(name), (int, float))
        ]
        if name.startswith("eval_"):
            points: list[Point] = [(cost, value) for _, cost, value in found]
        else:
            parts = np.searchsorted(ends, [step for step, _, _ in found])
            points = [
                (of[-1][1], float(np.mean([value for _, _, value in of])))
                for k in range(len(ends))
                if (of := [f for f, part in zip(found, parts, strict=True) if part == k])
            ]
            if name in ("rl_plugins/tokens_decoded", "rl_plugins/rows_made") and found:
                points = [(found[-1][1], found[-1][2])]
        if points:
            out[name] = points
    return out


class Results:
    """All runs, by (task, variant, seed)."""

    def __init__(self, runs: Iterable[BenchRun] = ()) -> None:
        self.runs: dict[tuple[str, str, int], BenchRun] = {}
        for run in runs:
            self.add(run)

    def add(self, run: BenchRun) -> None:
        """Adds a run, or replaces it."""
        self.runs[run.record["task"], run.record["variant"], run.record["seed"]] = run

    def has(self, task: str, variant: str, seed: int) -> bool:
        """Whether a run was made with the settings of now. Failed ones count; a version bump does not."""
        run = self.runs.get((task, variant, seed))
        return run is not None and is_current(run)

    def seeds(self, task: str, variant: str, of: Sequence[int] = range(SEARCH_FROM)) -> list[int]:
        """Seeds of the runs that ended well, with the settings of now. Those of a search only if they are asked for."""
        found = {s: self.runs[task, variant, s] for s in of if (task, variant, s) in self.runs}
        return [s for s, run in found.items() if not run.error and is_current(run)]

    @classmethod
    def read(cls, folder: Path) -> Results:
        """Of a folder; empty if there are none.

        Raises:
            ConfigError: the files cannot be read.
        """
        if not (folder / "runs.parquet").exists():
            return cls()
        try:
            records = pq.read_table(folder / "runs.parquet").to_pylist()
            curves = pq.read_table(folder / "curves.parquet").to_pylist()
        except (OSError, pa.ArrowInvalid) as error:
            raise ConfigError(
                f"The results in {folder} cannot be read ({error}). Remove them or name others."
            ) from None
        found = cls(BenchRun(record) for record in records)
        for row in curves:
            run = found.runs.get((row["task"], row["variant"], row["seed"]))
            if run is None:
                continue  # a process was killed between the two files; the run is made again
            costs = {"steps": row["step"], **{k: row[k] for k in COST_UNITS[1:]}}
            run.curves.setdefault(row["name"], []).append((costs, row["value"]))
        return found

    def write(self, folder: Path) -> None:
        """Writes both tables, each whole or not at all."""
        order = [self.runs[key] for key in sorted(self.runs)]
        rows = [
            {k: run.record[k] for k in ("task", "variant", "seed", "host")}
            | {"step": int(costs["steps"]), "name": name, "value": value}
            | {k: costs[k] for k in COST_UNITS[1:]}
            for run in order
            for name, points in sorted(run.curves.items())
            for costs, value in points
        ]
        for name, table in (  # the runs last: one without its curves would count as made
            ("curves", pa.Table.from_pylist(rows, CURVES)),
            ("runs", pa.Table.from_pylist([run.record for run in order], RUNS)),
        ):
            with whole(folder / f"{name}.parquet") as part:
                pq.write_table(table, part, compression="zstd")


def is_current(run: BenchRun) -> bool:
    """Whether task and variant are still what they were."""
    r = run.record
    try:
        known = r["task"] in TASKS and TASKS[r["task"]].fingerprint == r["task_fingerprint"]
        return known and variant_fingerprint(r["variant"]) == r["variant_fingerprint"]
    except ConfigError:
        return False
