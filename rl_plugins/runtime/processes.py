"""The processes of a run end with the command that started them, however that ends.

They carry variables: which command it is, and the folder of the run. Each trainer watches the command
(`end_with_command`). A command that begins a run ends what is left there of an earlier one (`end_all`): launchers, and
daemons like Ray's that outlive a trainer.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil

COMMAND, FOLDER = "RL_PLUGINS_COMMAND", "RL_PLUGINS_RUN_FOLDER"  # variables of the environment
PAUSE = 0.2  # seconds between two looks
_APART = 60.0  # seconds; starts of processes that differ more are of two processes, less may be a clock that was set


def environment(folder: Path | None = None) -> dict[str, str]:
    """Variables for processes that this one starts.

    Args:
        folder: of the run that they belong to.
    """
    command = {COMMAND: f"{os.getpid()} {psutil.Process().create_time()}"}
    return command if folder is None else {**command, FOLDER: str(folder.absolute())}


def command() -> Callable[[], bool]:
    """A function that says whether the command that started this process is still there; always, if none did."""
    number, _, started = os.environ.get(COMMAND, "").partition(" ")
    if not number:
        return lambda: True
    try:
        process = psutil.Process(int(number))
        if abs(process.create_time() - float(started)) > _APART:
            return lambda: False
    except psutil.NoSuchProcess:
        return lambda: False

    def runs() -> bool:
        with contextlib.suppress(psutil.NoSuchProcess):
            return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
        return False

    return runs


def end_with_command() -> None:
    """Ends this process as soon as the command that started it is gone. It would go on writing where the next command
    begins anew."""
    runs = command()
    if not runs():
        os._exit(1)

    def watch() -> None:
        while runs():
            time.sleep(PAUSE)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def end_all(folder: Path, tries: int = 50) -> None:
    """Kills every other process of the run in this folder, and waits for their end. Ray's daemons ignore SIGTERM."""
    wanted = str(folder.absolute())
    for _ in range(tries):
        left = [p for p in psutil.process_iter() if p.pid != os.getpid() and _belongs(p, wanted)]
        for process in left:
            with contextlib.suppress(psutil.Error):
                process.kill()
        if not left:
            return
        time.sleep(PAUSE)


def _belongs(process: psutil.Process, folder: str) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(FOLDER) == folder
    return False
