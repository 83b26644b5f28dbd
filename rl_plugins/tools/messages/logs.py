"""Logs of the guard as files, one line of JSON per rollout, and where a marker was in them."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import read_json

_lock = threading.Lock()


def write_log(folder: str | Path, entry: Mapping[str, Any]) -> None:
    """Appends an entry as a line to this process's file in the folder. Processes and threads may write at once."""
    line = json.dumps(entry, ensure_ascii=False).encode("utf-8", "backslashreplace") + b"\n"
    folder = Path(folder)
    with _lock:
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f"{socket.gethostname()}-{os.getpid()}.jsonl").open("ab") as file:
            file.write(line)


def read_logs(folder: str | Path) -> Iterator[dict[str, Any]]:
    """The entries of all files in the folder.

    Raises:
        ConfigError: the folder has no such file.
    """
    files = sorted(Path(folder).glob("*.jsonl"))
    if not files:
        raise ConfigError(f"{folder} has no file *.jsonl. Name the folder that `guard_log` of a run names.")
    for file in files:
        with file.open(encoding="utf-8") as lines:
            yield from (read_json(line) for line in lines if line.endswith("\n"))  # the last one may be unfinished


def marker_run(records: Iterable[Mapping[str, Any]], agents: Sequence[str], marker: str) -> np.ndarray:
    """Which agents wrote a marker in which round, as `estimate_rates` reads it.

    An agent that wrote nothing in a round is as it was before. Leave out agents that never write: nothing is known of
    them.

    Args:
        records: of one guard, through which every message of the agents went.
        agents: their names.
        marker: a text, found without regard to case.

    Returns:
        (rounds, agents) bool; rounds count from 0 to the last one.
    """
    wrote: dict[tuple[int, str], bool] = {}
    for r in records:
        if r["receiver"]:
            at = (r["round"], r["sender"])
            wrote[at] = wrote.get(at, False) or marker.casefold() in r["message"].casefold()
    rounds = 1 + max((r for r, _ in wrote), default=-1)
    has = np.zeros((rounds, len(agents)), bool)
    for i, name in enumerate(agents):
        before = False
        for t in range(rounds):
            before = has[t, i] = wrote.get((t, name), before)
    return has
