"""Writes a traced batch, in a thread of its own, so that training does not wait for it.

A batch is a few files, each written under another name first and then renamed: a run that is killed leaves whole files.
Files of the first batch that is written, and of later ones, are of another run, or of this one before it was resumed.
They leave first.
"""

from __future__ import annotations

import copy
import os
import re
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from rl_plugins.core.errors import shortened
from rl_plugins.core.rollouts import Run
from rl_plugins.runtime.trace import schema
from rl_plugins.runtime.trace.batch import TracedBatch, Updated
from rl_plugins.runtime.trace.notes import written
from rl_plugins.runtime.trace.publish import table_rows
from rl_plugins.runtime.trace.records import Read, batch_record, row_records, update_records

TABLES = ("rollouts", "batches", "tokens", "updates")
_NUMBER = re.compile(r"batch-(\d+)\.parquet")


class Writer:
    """Files of a trace.

    Args:
        folder: of the trace.
        run: host, tokenizer.
        max_gb: on disk.
        methods: of the run, in order.
        table: rollouts of a batch that `take_table` gives.
    """

    def __init__(self, folder: Path, run: Run, max_gb: float, methods: Sequence[str], table: int = 0) -> None:
        self.folder, self.methods, self.host = folder, tuple(methods), run.host
        self._in_table, self._table = table, list[list[Any]]()
        self._most = max_gb * 1e9
        # a tokenizer of one thread: two that use it at a time fail
        self._chat = copy.deepcopy(run.chat)
        self._pool = ThreadPoolExecutor(1, "rl-plugins-trace")
        self._pending: Future[None] | None = None
        self._begun = False
        self._texts: dict[int, str] = {}
        for name in TABLES:
            (folder / name).mkdir(parents=True, exist_ok=True)

    def write(self, batch: TracedBatch) -> None:
        """Begins to write a batch, after `wait`."""
        self._pending = self._pool.submit(self._write, batch, time.time())

    def write_updates(self, number: int, updates: Sequence[Updated]) -> None:
        """The optimizer steps of a batch so far, after whatever is being written."""
        before = self._pending

        def work() -> None:
            if before is not None:
                before.result()  # a failure of the batch itself is told once more, by `wait`
            self._put("updates", number, pa.Table.from_pylist(update_records(number, updates), schema.UPDATES))

        self._pending = self._pool.submit(work)

    def wait(self) -> str:
        """Until the batch that is being written is on disk; what went wrong with it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return ""
        failure = pending.exception()
        return "" if failure is None else f"{type(failure).__name__}: {shortened(failure, 200)}"

    def take_table(self) -> list[list[Any]]:
        """`table_rows` of the batch that was waited for, once. The thread that trains logs them: trackio knows its run
        there alone."""
        taken, self._table = self._table, []
        return taken

    def _write(self, batch: TracedBatch, now: float) -> None:
        read = Read(batch, self.host)
        records = row_records(read, self._decoded)
        number = batch.rollouts.batch
        if not self._begun:
            self._begun = True
            self._take_out(number)
        new = self._new_tokens(records)
        self._put("tokens", number, pa.Table.from_pylist(new, schema.TOKENS))
        self._put("rollouts", number, pa.Table.from_pylist(records, schema.ROLLOUTS))
        summary = batch_record(read, now, self.host, self.methods)
        self._put("batches", number, pa.Table.from_pylist([summary], schema.BATCHES))
        self._thin()
        self._table = table_rows(records[: self._in_table])

    def _take_out(self, number: int) -> None:
        """The batches from this one on."""
        for table in TABLES:
            for path in self._files(table):
                if int(_NUMBER.fullmatch(path.name)[1]) >= number:  # type: ignore[index]
                    path.unlink()

    def _put(self, table: str, number: int, content: pa.Table) -> None:
        path = self.folder / table / f"batch-{number:08d}.parquet"
        if table == "tokens" and not len(content):
            return
        unfinished = path.with_suffix(f".{os.getpid()}.unfinished")
        pq.write_table(content, unfinished, compression="zstd")
        os.replace(unfinished, path)

    def _decoded(self, ids: Sequence[int]) -> str:
        return "" if self._chat is None else written(self._chat.decode(ids, special=True))

    def _new_tokens(self, records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Texts of the token ids that no earlier batch had."""
        found: set[int] = set()
        for record in records:
            found.update(record["prompt_ids"].tolist(), record["completion_ids"].tolist())
        new = sorted(found - self._texts.keys())
        self._texts |= {i: "" if self._chat is None else written(self._chat.piece(i)) for i in new}
        return [{"id": i, "text": self._texts[i]} for i in new]

    def _thin(self) -> None:
        """The oldest batches leave until the rest fits; the newest stays whatever its size."""
        sizes = {path: path.stat().st_size for path in self._files("rollouts")}
        total = sum(sizes.values()) + sum(p.stat().st_size for t in TABLES[1:] for p in self._files(t))
        for path in list(sizes)[:-1]:  # summaries of batches and texts of tokens are small, and stay
            if total <= self._most:
                return
            total -= sizes[path]
            path.unlink()
            (self.folder / "updates" / path.name).unlink(missing_ok=True)

    def _files(self, table: str) -> Iterator[Path]:
        """Of a table, oldest batch first."""
        found = [p for p in (self.folder / table).iterdir() if _NUMBER.fullmatch(p.name)]
        yield from sorted(found)


__all__ = ["TABLES", "Writer"]
