"""The files of a trace, and what is computed of a group: trees of completions that share a beginning."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rl_plugins.errors import ConfigError

Record = dict[str, Any]
_NUMBER = re.compile(r"batch-(\d+)\.parquet")


class TraceFolder:
    """A trace on disk; files are read when they are asked for.

    Args:
        run: folder of a run (with the folder `trace`), or of the trace itself.

    Raises:
        ConfigError: there is no trace.
    """

    def __init__(self, run: Path) -> None:
        here = [folder for folder in (run / "trace", run) if (folder / "batches").is_dir()]
        if not here:
            raise ConfigError(
                f"{run} has no trace. Give the folder of a run that was made with the config word `trace: true` "
                f"(verl: +rl_plugins.trace=true)."
            )
        self.path = here[0]
        if not self.numbers:
            raise ConfigError(f"The trace in {self.path} has no batch yet. Wait until the run has made one.")

    @cached_property
    def numbers(self) -> list[int]:
        """Generation batches with a summary."""
        return self._numbers("batches")

    @cached_property
    def recorded(self) -> list[int]:
        """Generation batches whose rollouts are there."""
        return self._numbers("rollouts")

    @cached_property
    def batches(self) -> list[Record]:
        """Summaries of all batches, in order."""
        return [record for number in self.numbers for record in self._read("batches", number)]

    @cached_property
    def texts(self) -> dict[int, str]:
        """Token id -> text."""
        found: dict[int, str] = {}
        for number in self._numbers("tokens"):
            found |= {record["id"]: record["text"] for record in self._read("tokens", number)}
        return found

    def rollouts(self, batch: int, group: int | None = None) -> list[Record]:
        """Records of a batch, or of one of its groups.

        Raises:
            ConfigError: they are not there.
        """
        if batch not in self.recorded:
            where = "has a summary only (older batches leave when `max_gb` is reached)" if batch in self.numbers else ""
            raise ConfigError(f"Batch {batch} {where or 'is not in the trace'}. Recorded are {_ranges(self.recorded)}.")
        rows = self._read("rollouts", batch, None if group is None else [("group", "=", group)])
        if not rows:
            there = sorted({row["group"] for row in self._read("rollouts", batch)})
            raise ConfigError(f"Batch {batch} has no recorded group {group}. Recorded are {_ranges(there)}.")
        return rows

    def _read(self, table: str, number: int, filters: Any = None) -> list[Record]:
        import pyarrow.parquet as pq

        path = self.path / table / f"batch-{number:08d}.parquet"
        return list(pq.read_table(path, filters=filters).to_pylist())

    def _numbers(self, table: str) -> list[int]:
        found = (_NUMBER.fullmatch(p.name) for p in (self.path / table).iterdir())
        return sorted(int(m[1]) for m in found if m)


@dataclass(frozen=True)
class SharedPiece:
    """A piece that one or several completions of a group share.

    Args:
        rows: places of these completions in the group.
        start, stop: of the piece in them.
        branches: what follows, where they part.
    """

    rows: tuple[int, ...]
    start: int
    stop: int
    branches: tuple[SharedPiece, ...] = ()


def tree_of(completions: Sequence[Sequence[int]]) -> SharedPiece:
    """The completions of a group as a tree: they share a piece as long as their token ids are equal."""

    def grow(rows: tuple[int, ...], start: int) -> SharedPiece:
        stop = start
        while True:
            tokens = {completions[i][stop] if stop < len(completions[i]) else None for i in rows}
            if len(tokens) > 1 or tokens == {None}:
                break
            stop += 1
        if len(rows) == 1 or tokens == {None}:
            return SharedPiece(rows, start, stop)
        parts: dict[int | None, list[int]] = {}
        for i in rows:
            parts.setdefault(completions[i][stop] if stop < len(completions[i]) else None, []).append(i)
        return SharedPiece(rows, start, stop, tuple(grow(tuple(part), stop) for part in parts.values()))

    return grow(tuple(range(len(completions))), 0)


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 -> "1 to 3, 7"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], n]
        else:
            parts.append([n, n])
    return ", ".join(f"{a} to {b}" if a != b else str(a) for a, b in parts) or "none"
