"""`Trace`: collects what the driver hooks of a batch return, and hands it to the writer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from rl_plugins.core.errors import ConfigError, did_you_mean, shortened, shown
from rl_plugins.core.method import TOKEN_SIGNALS, Method, RowNote, TurnNote
from rl_plugins.core.params import MethodParams, param
from rl_plugins.core.requests import ORIGIN
from rl_plugins.core.rollouts import Plan, PlanRow, Rollouts, RowRatio, Run, Tokens
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import Watcher
from rl_plugins.runtime.trace.batch import Seen, TracedBatch, Updated
from rl_plugins.runtime.trace.notes import rendered
from rl_plugins.runtime.trace.publish import log_table, push
from rl_plugins.runtime.trace.writer import Writer

RATIO = "ratio"
SIGNALS = (*sorted(TOKEN_SIGNALS - {"sum_squared_probs", "teacher_logprobs"}), RATIO, "turns")


@dataclass(frozen=True)
class TraceParams(MethodParams):
    """Options of the config word `trace`."""

    every: int = param(1, "batches from one recorded one to the next", ge=1)
    groups: int = param(0, "groups of a batch that are recorded, drawn at random; 0: all", ge=0)
    max_gb: float = param(4.0, "GB on disk; the oldest batches leave when there are more", gt=0)
    signals: tuple[str, ...] = param(
        (), f"what is recorded per token in addition to ids and advantages: {', '.join(SIGNALS)}"
    )
    folder: str = param("", "where the trace is written; empty: the folder `trace` of the run")
    table: int = param(0, "rollouts of a batch that the run's tracker (W&B, trackio) gets as a table; 0: none", ge=0)
    hub: str = param(
        "",
        "dataset repository of the Hugging Face Hub, OWNER/NAME, that gets the files at the end; private if it is new",
    )

    def check(self) -> None:
        for name in self.signals:
            if name not in SIGNALS:
                raise ConfigError(
                    f"`signals` names {shown(name)}. Allowed are {', '.join(SIGNALS)}."
                    f"{did_you_mean(str(name), SIGNALS)}"
                )


@dataclass
class _Planned:
    """What was planned since the last decisions."""

    rows: dict[int, tuple[PlanRow, tuple[str, ...]]] = field(default_factory=dict)
    selected: tuple[str, tuple[int, ...]] = ("", ())
    notes: list[tuple[str, RowNote]] = field(default_factory=list)

    def prompts(self) -> list[dict[str, Any]]:
        """Notes of prompts as records."""
        found = []
        for hook, note in self.notes:
            for number, said in rendered(note, 0):
                row = self.rows[number][0].prompt_index if hook == "plan" and number in self.rows else -1
                where = {"prompt_index": row, "group": number} if hook == "plan" else {"prompt_index": number}
                found.append({**where, "method": note.method, "hook": hook, **said})
        return found


class Trace(Watcher):
    """Writes what was generated and what became of it; decides nothing.

    Args:
        params: see `TraceParams`.
        folder: the run's output folder.

    Raises:
        ConfigError: from the preflight check, if the run does not have a signal that is asked for.
    """

    name = "trace"
    does = "Writes rollouts, rewards, advantages and every decision to Parquet files"
    Params = TraceParams
    keeps_batch_size = True
    brings = frozenset({f"column:{ORIGIN}"})

    def __init__(self, params: TraceParams, folder: str = "") -> None:
        super().__init__(params)
        self.folder = Path(params.folder or Path(folder) / "trace")
        self.needs = frozenset({"tokens", "token_ids", *params.signals} - {RATIO})
        self._seen: list[Seen] = []
        self._planned = _Planned()
        self._writer: Writer | None = None
        self._run: Run | None = None
        self._last: tuple[int, frozenset[int]] | None = None  # batch whose updates come next, and its recorded rows
        self._updates: list[Updated] = []

    def check(self, run: Run) -> None:
        if self.wants_ratios and run.host != "trl":
            raise ConfigError(
                f"`signals` names `{RATIO}`, and {run.host} computes its loss where the trace is not told of it. Only "
                f"TRL's trainer records importance ratios. Remove `{RATIO}`."
            )

    def looks(self, batch: int) -> bool:
        return batch % self.params.every == 0

    def watches(self, methods: Sequence[Method]) -> None:
        if any("rollout" in m.claims() for m in methods):
            self.needs |= {f"column:{ORIGIN}"}

    def start(self, run: Run) -> None:
        self._run = run
        self._writer = Writer(self.folder, run, self.params.max_gb, self._methods, self.params.table)

    @property
    def _methods(self) -> tuple[str, ...]:
        return tuple(getattr(self._context, "names", ()))

    def saw(
        self, hook: str, method: str, args: tuple[Any, ...], result: Any, notes: Sequence[RowNote | TurnNote]
    ) -> None:
        if method == self.name:
            return
        if hook == "select_prompts":
            self._planned.selected = (method, (*self._planned.selected[1], *map(int, result)))
            self._planned.notes += [(hook, n) for n in notes if isinstance(n, RowNote)]
        elif hook == "plan" and self._run is not None and not self._run.buffered:
            self._note_plan(method, args[0], result)
            self._planned.notes += [(hook, n) for n in notes if isinstance(n, RowNote)]
        elif hook in ("rewards", "select", "advantages", "shape") or (hook == "observe" and notes):
            self._seen.append(Seen(hook, method, args, result, tuple(notes)))

    def _note_plan(self, method: str, before: Plan, after: Any) -> None:
        rows = self._planned.rows
        if before.round == 0 and not any(by for _, by in rows.values()):
            rows.clear()  # of the evaluation, or of a plan that came to nothing
            if method == self._context.claims["plan"][0].name:  # type: ignore[union-attr]
                self._planned.notes = [(hook, n) for hook, n in self._planned.notes if hook != "plan"]
        known = {row.group: row for row in before.rows}
        for row in (after or before).rows:
            by = rows[row.group][1] if row.group in rows else ()
            changed = row is not known.get(row.group) and row != known.get(row.group)
            first = rows[row.group][0] if row.group in rows and before.round else row
            rows[row.group] = (first, (*by, method) if changed and method not in by else by)

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        seen, planned = self._seen, self._planned
        self._seen, self._planned = [], _Planned()
        self._last, self._updates = None, []
        if not self.looks(rollouts.batch) or self._writer is None:
            return
        batch = TracedBatch(
            rollouts,
            tokens,
            seen,
            planned.rows,
            planned.selected,
            planned.prompts(),
            self._chosen(rollouts),
            # what the methods have logged of this batch so far joins what the updates before logged
            {**stats, **combine([self._context.metrics.look()])},  # type: ignore[union-attr]
        )
        rows = frozenset(i for i, g in enumerate(rollouts.group.tolist()) if g in batch.groups)
        self._last = (rollouts.batch, rows)
        self._wait()
        table = self._writer.take_table()
        self._writer.write(batch)
        if self._run is not None and rollouts.batch + self.params.every >= self._run.total_batches:
            self._wait()  # the host ends its tracker before it says that training ended
            table += self._writer.take_table()  # one table of both: W&B keeps one of a step
        self._log(table)

    def _wait(self) -> None:
        """Until the batch before is on disk."""
        assert self._writer is not None
        if failed := self._writer.wait():
            self.warn(f"a batch could not be written to {self.folder}: {failed}. Training goes on without it.")

    def _log(self, table: list[list[Any]]) -> None:
        with self._going_on("a table could not be logged to the tracker"):
            log_table(table)

    @contextmanager
    def _going_on(self, problem: str) -> Iterator[None]:
        try:
            yield
        except Exception as e:
            self.warn(f"{problem}: {type(e).__name__}: {shortened(e, 200)}. Training goes on without it.")

    @property
    def wants_ratios(self) -> bool:
        return RATIO in self.params.signals

    def updated(self, scaled: Mapping[str, float] | None, ratios: Sequence[RowRatio]) -> None:
        known, stats = self._updates, dict(self._context.stats)  # type: ignore[union-attr]
        if self._last is None or self._writer is None or not (scaled or ratios or stats):
            return
        batch, rows = self._last
        chosen = [r for r in ratios if r.row in rows]
        if len(known) > 1:  # ratios of the first and of the last one are kept
            known[-1] = known[-1].without_ratios()
        known.append(Updated(None if scaled is None else dict(scaled), stats, chosen))
        self._writer.write_updates(batch, tuple(known))

    def ended(self) -> None:
        if self._writer is None:
            return
        self._wait()
        self._log(self._writer.take_table())
        if self.params.hub:
            with self._going_on(f"{self.folder} could not be uploaded to {self.params.hub}"):
                push(self.folder, self.params.hub)

    def _chosen(self, rollouts: Rollouts) -> frozenset[int]:
        ids = rollouts.groups.ids
        most = self.params.groups
        if not most or len(ids) <= most:
            return frozenset(ids.tolist())
        places = self.rng("groups").permutation(len(ids))[:most]
        return frozenset(ids[torch.from_numpy(places)].tolist())
