"""The trace of a run: what was generated, what each method did with it and why, as Parquet files.

`trace: true` in a TRL config, `+rl_plugins.trace=true` in verl. docs/inspect.md shows what to do with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.core.params import build_params
from rl_plugins.runtime.config_text import read_json_or_yaml
from rl_plugins.runtime.stack import Watcher

FOLDER = "trace"
"""Of a run's output folder."""


def trace_of(value: Any, name: str, folder: str) -> list[Watcher]:
    """The trace that a config word asks for; none if it is off.

    Args:
        value: None or false: off; true: every batch, all groups; or a mapping of `TraceParams`; on a command line as
            text.
        name: of the word, for messages.
        folder: the run's output folder.

    Raises:
        ConfigError: something else, or an unknown option.
    """
    if isinstance(value, str):
        value = read_json_or_yaml(value, f"`{name}`") if value.strip() else None
    if value is None or value is False:
        return []
    if value is not True and not isinstance(value, Mapping):
        raise ConfigError(
            f"`{name}` is {shown(value)}. Give true, false, or options such as {{every: 10, groups: 16}}."
        )
    from rl_plugins.runtime.trace.recorder import Trace, TraceParams

    params = build_params(TraceParams, {} if value is True else dict(value), name)
    assert isinstance(params, TraceParams)
    return [Trace(params, folder)]


__all__ = ["FOLDER", "trace_of"]
