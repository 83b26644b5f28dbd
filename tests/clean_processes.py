"""Child processes that run a trainer.

A child must not be forked from a process that has used a tokenizer: its thread pool is gone in the child, which then
waits for it for ever. Here children are forked from a server that has only imported.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import socket
import sys
import traceback
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from typing import Any
from unittest import mock

from waiting import NEVER

MODULES = ["harness", "probes", "run_kills"]  # imported once, in the server; those that cannot be are left out


def clean() -> ForkServerContext:
    """`multiprocessing` with such children. What they run and its arguments are pickled."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p)):
        forkserver.ensure_running()  # Python 3.11 gives it no sys.path
    return context


def ranks(count: int, module: str, function: str, *args: Any) -> None:
    """Runs a function of a test module in so many ranks of gloo, as torchrun would.

    Raises:
        AssertionError: one did not come to its end, with what it raised.
    """
    context = clean()
    said = context.SimpleQueue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [
        context.Process(target=_rank, args=(said, r, count, port, module, function, args)) for r in range(count)
    ]
    for child in children:
        child.start()
    wait([child.sentinel for child in children], NEVER)
    for child in children:  # the others wait for one that failed
        child.join(NEVER if all(c.exitcode in (None, 0) for c in children) else 5.0)
    codes = [child.exitcode for child in children]
    for child in children:
        child.kill()
    assert codes == [0] * count, f"{codes}\n{'' if said.empty() else said.get()}"


def _rank(said: Any, rank: int, count: int, port: int, module: str, function: str, args: tuple[Any, ...]) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), GLOO_SOCKET_IFNAME="lo")
    import harness

    harness.WORLD = count  # it was imported where there was one rank
    try:
        getattr(importlib.import_module(module), function)(*args)
    except BaseException:
        said.put(traceback.format_exc())
        os._exit(1)  # the others may wait for this one; they are ended by the test
    os._exit(0)
