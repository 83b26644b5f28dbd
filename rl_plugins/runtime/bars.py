"""Progress of a command: bars on a terminal, plain lines in a file."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID

T = TypeVar("T")
EVERY = 30.0  # seconds between two lines of a task


class Bars(Progress):
    """As rich's, but where the output is no terminal a task writes a line when it begins, every 30 s, and when it is
    complete. A `transient` one, which leaves nothing on a terminal, writes only those in between."""

    def __init__(self, *columns: str | ProgressColumn, console: Console, transient: bool = False) -> None:
        super().__init__(*columns, console=console, transient=transient, disable=_plain(console))
        self._transient = transient
        self._written: dict[TaskID, tuple[float, bool]] = {}  # when, and whether it was complete

    def add_task(self, *args: Any, **options: Any) -> TaskID:
        task = super().add_task(*args, **options)
        self._written[task] = (time.monotonic(), False)
        if not self._transient:
            self._write(task)
        return task

    def update(self, task_id: TaskID, *args: Any, **options: Any) -> None:
        super().update(task_id, *args, **options)
        self._write_if_due(task_id)

    def advance(self, task_id: TaskID, advance: float = 1) -> None:
        super().advance(task_id, advance)
        self._write_if_due(task_id)

    def _write_if_due(self, task_id: TaskID) -> None:
        when, complete = self._written[task_id]
        ends = self._tasks[task_id].finished and not complete and not self._transient
        if ends or time.monotonic() - when >= EVERY:
            self._write(task_id)

    def _write(self, task_id: TaskID) -> None:
        task = self._tasks[task_id]
        self._written[task_id] = (time.monotonic(), task.finished)
        if _plain(self.console):
            told = [column(task) for column in self.columns if isinstance(column, ProgressColumn)]
            words = " ".join(str(text) for text in told if hasattr(text, "plain"))
            self.console.print(words.strip(), markup=False, highlight=False, soft_wrap=True)


def when_begun(bars: Bars, what: str) -> Callable[[int, int, Any], None]:
    """Takes (step, total, anything) of work that may not be needed: its bar appears at the first step."""
    task: list[TaskID] = []

    def update(step: int, total: int, _: Any) -> None:
        if not task:
            task.append(bars.add_task(what, total=total))
        bars.update(task[0], completed=step)

    return update


def _plain(console: Console) -> bool:
    return not (console.is_terminal or console.is_jupyter)


def tracked(
    items: Iterable[T], what: str, console: Console, total: int | None = None, transient: bool = False
) -> Iterator[T]:
    """The items, with a bar of how many there were."""
    with Bars(*Progress.get_default_columns(), console=console, transient=transient) as bars:
        task = bars.add_task(what, total=len(items) if total is None and isinstance(items, Sized) else total)
        for item in items:
            yield item
            bars.advance(task)
