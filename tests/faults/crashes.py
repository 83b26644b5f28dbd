"""A disk that stops: every operation of `os` that changes files is counted, and from the n-th on nothing happens."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

CHANGES = ("mkdir", "open", "write", "fsync", "close", "rename", "replace", "unlink", "rmdir")


class Crash(BaseException):
    """The process is gone. No `except Exception` of the code under test sees it."""


class Disk:
    """Counts operations while it is entered.

    Args:
        stop: number of the operation that does not happen any more; None never stops.
        half: a write that does not happen has happened by half.
        power_loss: what was written and not flushed with fsync is lost, too.

    Attributes:
        done: operations so far, as (name, path).
    """

    def __init__(self, stop: int | None = None, half: bool = False, power_loss: bool = False) -> None:
        self.stop, self.half, self.power_loss = stop, half, power_loss
        self.done: list[tuple[str, str]] = []
        self.stopped = False
        self._real = {name: getattr(os, name) for name in CHANGES}
        self._paths: dict[int, str] = {}
        self._unsafe: set[str] = set()  # files with data that no fsync followed
        self._patch = mock.patch.multiple(os, **{name: self._wrapped(name) for name in CHANGES})

    def __enter__(self) -> Disk:
        self._patch.start()
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> bool:
        self._patch.stop()
        if self.stopped and self.power_loss:
            for path in self._unsafe:
                if Path(path).exists():
                    Path(path).write_bytes(b"")
        return kind is Crash

    def _wrapped(self, name: str) -> Callable[..., Any]:
        def operation(*args: Any, **kwargs: Any) -> Any:
            real = self._real[name]
            if self.stopped or (self.stop is not None and len(self.done) == self.stop):
                if name == "close":  # of this process; the one that is simulated has no file open any more
                    with contextlib.suppress(OSError):  # closed already
                        real(*args)
                if name == "write" and self.half and not self.stopped:
                    real(args[0], bytes(args[1])[: len(args[1]) // 2])
                self.stopped = True
                raise Crash
            path = self._path(args[0])
            self.done.append((name, path))
            if name == "fsync":  # what is on the disk is modelled here, and a real flush is slow
                self._unsafe.discard(path)
                return None
            result = real(*args, **kwargs)
            if name == "open":
                folder = kwargs.get("dir_fd")
                self._paths[result] = path if folder is None else os.path.join(self._path(folder), path)
            elif name == "write":
                self._unsafe.add(path)
            elif name in ("rename", "replace"):
                new = os.fspath(args[1])
                moved = {p for p in self._unsafe if p == path or p.startswith(path + os.sep)}
                self._unsafe = (self._unsafe - moved) | {new + p[len(path) :] for p in moved}
            return result

        return operation

    def _path(self, where: Any) -> str:
        return self._paths.get(where, str(where)) if isinstance(where, int) else os.fspath(where)
