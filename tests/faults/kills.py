"""A process that saves in a loop is killed with SIGKILL at a random moment; then its last save, or the one it was at,
is found whole.

    python tests/faults/kills.py --kills 2000 --seed 1

Half of the kills come after a random wait, anywhere in the loop; the other half inside a save, after a random number of
operations of the file system, where the process stops itself.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import struct
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from crashes import CHANGES

from rl_plugins.runtime.state import load_state, save_state

NUMBER = struct.Struct("<q")
HANGS = 60.0  # seconds; only a process that does not do what it should gets there


def content(number: int) -> dict[str, Any]:
    """What save `number` writes; its size changes from save to save."""
    size = 1 + number * 7919 % 3000
    return {"number": number, "list": [number] * (size % 50), "tensor": torch.full((size,), float(number))}


def saver(folder: Path, first: int, operations: int | None, ready: Any, finished: int) -> None:
    """In the child: saves `first`, `first` + 1, .. until it is killed, and says which are done."""
    done = 0

    def counted(real: Any) -> Any:
        def operation(*args: Any, **kwargs: Any) -> Any:
            nonlocal done
            done += 1
            if done == operations:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **kwargs)

        return operation

    report = os.write  # not counted
    ready.set()
    with mock.patch.multiple(os, **{name: counted(getattr(os, name)) for name in CHANGES}):
        number = first
        while True:
            save_state(folder, content(number))
            report(finished, NUMBER.pack(number))
            number += 1


def kill_once(folder: Path, first: int, rng: random.Random) -> tuple[int, str]:
    """Starts a saver, kills it, and looks at what it left.

    Returns:
        The number of the save that is found, or -1; and the folders that the kill left.

    Raises:
        AssertionError: nothing is found after a finished save, or something else than the last finished save and the
            one after it.
    """
    context = multiprocessing.get_context("fork")
    by_itself = rng.random() < 0.5
    operations = rng.randrange(1, 120) if by_itself else None
    out, into = os.pipe()
    ready = context.Event()
    child = context.Process(target=saver, args=(folder, first, operations, ready, into), daemon=True)
    child.start()
    os.close(into)
    try:
        assert ready.wait(HANGS), "the process does not begin"
        if not by_itself:
            time.sleep(rng.random() * 0.05)
            child.kill()
        child.join(HANGS)
        assert child.exitcode == -signal.SIGKILL, f"it ended by itself: {child.exitcode}"
        said = b""
        while part := os.read(out, 1 << 16):
            said += part
    finally:
        child.kill()
        os.close(out)
    numbers = [n for (n,) in NUMBER.iter_unpack(said)]
    assert numbers == list(range(first, first + len(numbers)))
    last = numbers[-1] if numbers else first - 1
    there = sorted(p.name for p in folder.iterdir()) if folder.exists() else []
    found = load_state(folder)
    if found is None:
        assert last < 0, f"save {last} was finished, and nothing is found; there is {there}"
        return -1, ", ".join(there)
    number = found["number"]
    assert number in (last, last + 1), f"save {number} is found, {last} was the last finished one"
    wanted = content(number)
    assert torch.equal(found["tensor"], wanted["tensor"]) and found["list"] == wanted["list"], "a mixture"
    return number, ", ".join(there)


def attack(kills: int, seed: int, folder: Path) -> Counter[str]:
    """So many kills; every process goes on in the folder the one before left. What lay there after the kills."""
    rng = random.Random(seed)
    left: Counter[str] = Counter()
    number = -1
    for _ in range(kills):
        if rng.random() < 0.2:  # a first save
            shutil.rmtree(folder, ignore_errors=True)
            number = -1
        number, there = kill_once(folder, number + 1, rng)
        left[there or "nothing"] += 1
    return left


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()  # of saves that were cut off
    save_warm_up()
    with tempfile.TemporaryDirectory() as folder:
        left = attack(arguments.kills, arguments.seed, Path(folder) / "checkpoint")
    print(json.dumps(left, indent=1))
    print(f"{arguments.kills} kills: every state that was finished, or the one after it, is whole.")


def save_warm_up() -> None:
    """Imports what a save imports, so that the children need not."""
    with tempfile.TemporaryDirectory() as folder:
        save_state(folder, content(0))
        load_state(folder)


if __name__ == "__main__":
    main()
