"""The files of a trace, read when they are asked for."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import parquet_of

Record = dict[str, Any]
NOISE = 1e-4
"""Differences of advantages up to this are rounding: hosts compute them in float32."""
_NUMBER = re.compile(r"batch-(\d+)\.parquet")


class TraceFolder:
    """A trace on disk.

    Args:
        run: folder of a run (with the folder `trace`), of the trace itself, or a folder above one run alone: verl
            writes to checkpoints/PROJECT/EXPERIMENT.
        last: newest batches whose rollouts are looked at; None: all.

    Raises:
        ConfigError: there is no trace, or there are several.
    """

    def __init__(self, run: Path, last: int | None = None) -> None:
        self.path, self.last = _place_of(run), last
        # groups of one batch are usually looked at one after another
        self._whole = lru_cache(maxsize=2)(self._read_rollouts)
        self.why_chosen = lru_cache(maxsize=2)(self._why_chosen)
        if not self.numbers:
            raise ConfigError(f"The trace in {self.path} has no batch yet. Wait until the run has made one.")

    @cached_property
    def numbers(self) -> list[int]:
        """Generation batches with a summary."""
        return self._numbers("batches")

    @cached_property
    def recorded(self) -> list[int]:
        """Generation batches whose rollouts are there."""
        return self._numbers("rollouts")[-(self.last or 0) :]

    def bytes_of(self, batch: int) -> int:
        """Size of the rollouts of a batch on disk."""
        return self._file("rollouts", batch).stat().st_size

    @cached_property
    def batches(self) -> list[Record]:
        """Summaries of all batches, in order."""
        found = [record for n in self.numbers for record in self.table("batches", n).to_pylist()]
        for group in (g for record in found for g in record["groups"]):
            if group["change"] is not None and group["change"] <= NOISE:
                group["change"] = 0.0
        return found

    @cached_property
    def texts(self) -> dict[int, str]:
        """Token id -> text."""
        found: dict[int, str] = {}
        for number in self._numbers("tokens"):
            table = self.table("tokens", number)
            found |= zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True)
        return found

    def rollouts(self, batch: int, group: int | None = None) -> list[Record]:
        """Records of a batch, or of one of its groups.

        Raises:
            ConfigError: they are not there.
        """
        return list(self.rollout_table(batch, group).to_pylist())

    def rollout_table(self, batch: int, group: int | None = None) -> Any:
        """Like `rollouts`, as a table of Arrow.

        Raises:
            ConfigError: they are not there.
        """
        import pyarrow.compute as pc

        if batch not in self.recorded:
            where = "has a summary only (older batches leave when `max_gb` is reached)" if batch in self.numbers else ""
            raise ConfigError(f"Batch {batch} {where or 'is not in the trace'}. Recorded are {_ranges(self.recorded)}.")
        try:
            whole = self._whole(batch)
        except FileNotFoundError:
            raise ConfigError(f"The rollouts of batch {batch} have just left the trace (`max_gb`).") from None
        if group is None:
            return whole
        rows = whole.filter(pc.equal(whole["group"], group))
        if not len(rows):
            there = sorted(set(whole["group"].to_pylist()))
            raise ConfigError(f"Batch {batch} has no recorded group {group}. Recorded are {_ranges(there)}.")
        return rows

    def _why_chosen(self, batch: int) -> dict[int, list[str]]:
        """Group of a batch -> which method chose its prompt, and what methods said of the prompt. Groups wait in some
        runs, and asynchronous hosts choose ahead: then the choice is of an earlier batch, which is named."""
        groups: list[Record] = next((b["groups"] for b in self.batches if b["batch"] == batch), [])
        missing, chosen = {g["prompt_index"] for g in groups}, dict[int, list[str]]()
        planned: dict[int, list[str]] = {}
        for b in reversed([b for b in self.batches if b["batch"] <= batch]):
            here = missing & set(b["selected"])
            at = "" if b["batch"] == batch else f" (batch {b['batch']})"
            for note in b.get("prompts") or []:
                said = f"{note['method']}{at}: {note['text']}"
                if note["hook"] == "select_prompts" and note["prompt_index"] in here:
                    chosen.setdefault(note["prompt_index"], []).append(said)
                elif note["hook"] == "plan" and not at:
                    planned.setdefault(note["group"], []).append(said)
            for prompt in here:
                chosen.setdefault(prompt, [f"{b['selected_by']}{at}"])
            missing -= here
            if not missing:
                break
        return {g["group"]: chosen.get(g["prompt_index"], []) + planned.get(g["group"], []) for g in groups}

    def updates(self, number: int) -> list[Record]:
        """Records of the optimizer steps of a batch; none if they are not recorded."""
        try:
            return list(self.table("updates", number).to_pylist())
        except FileNotFoundError:
            return []

    def table(self, name: str, number: int, columns: Sequence[str] | None = None) -> Any:
        """A file of the trace; of the columns, those it has."""
        import pyarrow.parquet as pq

        path = self._file(name, number)
        with parquet_of(path):
            file = pq.ParquetFile(path)
            there = file.schema_arrow.names
            return file.read(None if columns is None else [c for c in columns if c in there], use_threads=False)

    def _file(self, name: str, number: int) -> Path:
        return self.path / name / f"batch-{number:08d}.parquet"

    def _read_rollouts(self, number: int) -> Any:
        return self.table("rollouts", number)

    def _numbers(self, table: str) -> list[int]:
        found = (_NUMBER.fullmatch(p.name) for p in (self.path / table).iterdir())
        return sorted(int(m[1]) for m in found if m)


def _place_of(run: Path) -> Path:
    for folder in (run / "trace", run):
        if (folder / "batches").is_dir():
            return folder
    below = sorted({b.parent for depth in range(1, 4) for b in run.glob("*/" * depth + "trace/batches")})
    if len(below) == 1:
        return below[0]
    if below:
        some = ", ".join(str(folder.parent) for folder in below[:10])
        raise ConfigError(f"{run} has {len(below)} runs with a trace. Give the folder of one of them: {some}.")
    raise ConfigError(
        f"{run} has no trace. Give the folder of a run that was made with the config word `trace: true` (verl: "
        f"+rl_plugins.trace=true; the folder is trainer.default_local_dir, checkpoints/PROJECT/EXPERIMENT if it is not "
        f"set)."
    )


def _ranges(numbers: Sequence[int]) -> str:
    """1, 2, 3, 7 -> "1 to 3, 7"."""
    parts: list[list[int]] = []
    for n in numbers:
        if parts and n == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], n]
        else:
            parts.append([n, n])
    return ", ".join(f"{a} to {b}" if a != b else str(a) for a, b in parts) or "none"
