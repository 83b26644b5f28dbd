"""Child processes that run a trainer.

A child must not be forked from a process that has used a tokenizer: its thread pool is gone in the child, which then
waits for it for ever. Here children are forked from a server that has only imported.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerContext
from unittest import mock

MODULES = ["harness", "probes", "run_kills"]  # imported once, in the server; those that cannot be are left out


def clean() -> ForkServerContext:
    """`multiprocessing` with such children. What they run and its arguments are pickled."""
    from multiprocessing import forkserver

    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(MODULES)
    with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(p for p in sys.path if p)):
        forkserver.ensure_running()  # Python 3.11 gives it no sys.path
    return context
