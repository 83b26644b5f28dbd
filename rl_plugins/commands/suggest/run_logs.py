"""Logs of a finished or running run as series of numbers: TRL's, verl's, those of `compare`, and TensorBoard's."""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError, shortened
from rl_plugins.core.files import read_json

FILES = (
    "trainer_state.json (TRL), log.jsonl (`rl-plugins compare`), .jsonl of verl's file logger, or TensorBoard events"
)

BESIDE = ("step", "max_steps", "seconds", "started", "epoch")  # values that an evaluation is logged with


@dataclass(frozen=True)
class RunLogs:
    """Logged values of one run.

    Attributes:
        file: what was read.
        host: "trl" or "verl", by the names of the values.
        series: name -> its values in the order of the steps. Evaluations are left out.
    """

    file: Path
    host: str
    series: Mapping[str, tuple[float, ...]]

    @property
    def steps(self) -> int:
        """Logged steps: the most that one of the values has, without those that stand beside evaluations, too."""
        of_training = [len(values) for name, values in self.series.items() if name not in BESIDE]
        return max(of_training, default=0)

    def mean(self, name: str) -> float | None:
        """Mean over all logged steps; None if the run has no such value."""
        values = self.series.get(name)
        return sum(values) / len(values) if values else None

    def first_and_last(self, name: str) -> tuple[float, float] | None:
        """Means of the first and of the last fifth of the logged steps; None with fewer than ten."""
        values = self.series.get(name, ())
        if len(values) < 10:
            return None
        fifth = len(values) // 5
        return sum(values[:fifth]) / fifth, sum(values[-fifth:]) / fifth


def read_logs(path: Path) -> RunLogs:
    """The logs in a file, or in the folder of a run.

    Raises:
        ConfigError: there is nothing to read, or it is no log of a run.
    """
    file = _file_in(path)
    rows = _tensorboard(file) if "tfevents" in file.name else _json_rows(file)
    series: dict[str, list[float]] = {}
    for row in rows:
        for name, value in row.items():
            number = isinstance(value, int | float) and not isinstance(value, bool)
            if number and math.isfinite(value) and not name.startswith(("eval_", "val-", "val_")):
                series.setdefault(name, []).append(float(value))
    if not series:
        raise ConfigError(f"{file} has no logged number. Give {FILES}.")
    host = (
        "verl" if any(n.startswith(("actor/", "critic/", "response_length/", "timing_s/")) for n in series) else "trl"
    )
    return RunLogs(file, host, {name: tuple(values) for name, values in series.items()})


def _file_in(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.exists():
        raise ConfigError(f"{path} does not exist. Give the folder of a run, or {FILES}.")
    for pattern in ("**/trainer_state.json", "**/log.jsonl", "**/*.jsonl", "**/*tfevents*"):
        found = sorted(path.glob(pattern), key=lambda file: file.stat().st_mtime)
        if found:
            return found[-1]
    raise ConfigError(f"{path} has no logs of a run. Give {FILES}.")


def _json_rows(file: Path) -> Iterator[Mapping[str, Any]]:
    text = file.read_text(encoding="utf-8", errors="replace")
    try:
        if file.suffix == ".json":
            rows = read_json(text)
            rows = rows.get("log_history") if isinstance(rows, dict) else rows
        else:
            lines = [line for line in text.splitlines(keepends=True) if line.strip()]
            whole = lines if text.endswith("\n") else lines[:-1]  # a run in progress is still writing the last one
            rows = [read_json(line) for line in (whole or lines)]
    except ValueError as e:
        raise ConfigError(f"{file} cannot be read as JSON: {shortened(e)}. Give {FILES}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{file} is no log of a run: it holds no list of logged steps. Give {FILES}.")
    for row in rows:
        yield row["data"] if isinstance(row.get("data"), dict) else row


def _tensorboard(file: Path) -> Iterator[Mapping[str, Any]]:
    try:
        accumulator = importlib.import_module("tensorboard.backend.event_processing.event_accumulator")
    except ImportError:
        raise ConfigError(f"{file} needs the package tensorboard to be read. Install it, or give {FILES}.") from None
    events = accumulator.EventAccumulator(str(file))
    events.Reload()
    for name in events.Tags()["scalars"]:
        for event in events.Scalars(name):
            yield {name.removeprefix("train/"): event.value}
