"""`rl-plugins inspect`: a trace in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from rl_plugins.errors import ConfigError
from rl_plugins.viewer.folder import TraceFolder
from rl_plugins.viewer.terminal import print_batch, print_group, print_run


def show(run: Path, batch: int | None, group: int | None) -> None:
    """Prints the batches of a trace, the groups of a batch, or the rollouts of a group.

    Raises:
        ConfigError: there is no trace, or not what is asked for.
    """
    if group is not None and batch is None:
        raise ConfigError(f"--group {group} is given without a batch. Say which one: --batch N --group {group}")
    trace, console = TraceFolder(run), Console(highlight=False)
    if batch is None:
        print_run(trace, console)
    elif group is None:
        print_batch(trace, batch, console)
    else:
        print_group(trace, batch, group, console)
