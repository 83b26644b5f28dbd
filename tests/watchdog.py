"""Whatever the tests started ends with them, however they end: done, interrupted, terminated or killed.

`tests/conftest.py` calls `watch` in every process of pytest (the one that was started, and each worker of xdist). It
puts a mark into the environment, which all processes started from here on inherit, and starts a process that waits for
the end of this one. Then that process kills whatever has the mark, with all that descends from it: the daemons of Ray
leave the process group and the session of their driver, but not its environment.

A handler of signals in pytest could not do it: SIGKILL has none, and a second Ctrl-C ends the first one's work. Only
forks of pytest that start no program are not found by a mark of their own, because they show the environment that
pytest was started with; those of an xdist worker have the mark of its master.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil

MARK = "TESTS_OF_RL_PLUGINS"  # not RL_PLUGINS_..: tests start processes without the variables of that name
POLL = 0.1  # seconds between two looks whether the process is still there
QUIET = 5  # looks in a row that found nothing, after which all are gone
LOOKS = 600  # at most; the kernel may hold on to a process for ever

_watchdogs: list[subprocess.Popen[bytes]] = []  # an object that is dropped warns of its process that still runs


def watch() -> str:
    """Marks what this process will start, and sees to it that all of it ends with this process.

    Returns:
        The mark of this process. Processes of a worker of xdist have that of the worker and that of its master.
    """
    mark = uuid.uuid4().hex
    outside = {k: v for k, v in os.environ.items() if k != MARK}  # the watchdog itself has no mark
    os.environ[MARK] = " ".join([*os.environ.get(MARK, "").split(), mark])
    os.environ["SPT_NOENV"] = "1"  # setproctitle, which Ray uses, overwrites the environment otherwise
    _watchdogs.append(
        subprocess.Popen(
            [sys.executable, str(Path(__file__).resolve()), str(os.getpid()), mark],
            env=outside,
            cwd="/",  # it must not hold a folder of the tests
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C in a terminal goes to a whole process group
        )
    )
    return mark


def marked(mark: str) -> list[psutil.Process]:
    """Processes that have the mark, and their descendants."""
    found: dict[int, psutil.Process] = {}
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, OSError):
            if mark in process.environ().get(MARK, "").split():
                found |= {p.pid: p for p in (process, *process.children(recursive=True))}
    found.pop(os.getpid(), None)
    return [p for p in found.values() if alive(p)]


def alive(process: psutil.Process) -> bool:
    """Whether it runs: what has ended and was not waited for does not."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False


def kill_all(mark: str) -> None:
    """Kills them until none is left; one may start another while the list is made."""
    quiet = 0
    for _ in range(LOOKS):
        left = marked(mark)
        quiet = 0 if left else quiet + 1
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if quiet == QUIET:
            return
        time.sleep(POLL)


def main() -> None:
    parent, mark = int(sys.argv[1]), sys.argv[2]
    while os.getppid() == parent:  # changes when the parent has ended, whatever its number is used for then
        time.sleep(POLL)
    kill_all(mark)


if __name__ == "__main__":
    main()
