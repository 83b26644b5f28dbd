"""What the files here share: imports of optional extras, and the event loop of libraries whose calls are coroutines."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import threading
from typing import Any

from rl_plugins.core.errors import ConfigError, pip_command


def library(module: str, extra: str) -> Any:
    """The module of an optional extra.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        return importlib.import_module(module)
    except ImportError as e:
        raise ConfigError(f"{module} cannot be imported ({e}). Install it ({pip_command(extra)}).") from e


def answered(value: Any) -> Any:
    """The value, or what an awaitable comes to. All of a process run in one event loop, as in the trainers that these
    environments were written for: a client that an environment keeps belongs to its loop."""
    return asyncio.run_coroutine_threadsafe(_awaited(value), _loop()).result() if inspect.isawaitable(value) else value


async def _awaited(value: Any) -> Any:
    return await value


_loops: list[asyncio.AbstractEventLoop] = []
_starting = threading.Lock()


def _loop() -> asyncio.AbstractEventLoop:
    with _starting:
        if not _loops:
            _loops.append(asyncio.new_event_loop())
            threading.Thread(target=_loops[0].run_forever, name="rl_plugins environments", daemon=True).start()
    return _loops[0]
