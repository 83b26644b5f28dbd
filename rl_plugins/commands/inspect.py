"""`rl-plugins inspect`: a trace as a page, or in the terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.progress import track

from rl_plugins.errors import ConfigError
from rl_plugins.viewer.folder import TraceFolder
from rl_plugins.viewer.page import write_page
from rl_plugins.viewer.serve import PageServer
from rl_plugins.viewer.terminal import print_batch, print_group, print_run


def show(run: Path, batch: int | None, group: int | None, html: Path | None, serve: bool, port: int) -> None:
    """Prints the batches of a trace, the groups of a batch, or the rollouts of a group; or makes a page of it.

    Raises:
        ConfigError: there is no trace, not what is asked for, or options that exclude each other.
    """
    if group is not None and batch is None:
        raise ConfigError(f"--group {group} is given without a batch. Say which one: --batch N --group {group}")
    if (html is not None) + serve + (batch is not None) > 1:
        raise ConfigError("--batch, --html and --serve show the trace in three ways. Give one of them.")
    trace, console = TraceFolder(run), Console(highlight=False)
    if html is not None:
        for _ in track(write_page(trace, html), "Writing the page", len(trace.recorded), console=console):
            pass
        console.print(f"Open {html / 'index.html'} in a browser.", markup=False, soft_wrap=True)
    elif serve:
        _serve(trace, port, console)
    elif batch is None:
        print_run(trace, console)
        console.print(f"As a page: rl-plugins inspect {run} --html page, or --serve.", markup=False, soft_wrap=True)
    elif group is None:
        print_batch(trace, batch, console)
    else:
        print_group(trace, batch, group, console)


def _serve(trace: TraceFolder, port: int, console: Console) -> None:
    try:
        server = PageServer(trace, port)
    except OSError as e:
        raise ConfigError(f"Port {port} cannot be used: {e.strerror}. Give another one, or none: --port 0") from None
    console.print(f"Open {server.url} in a browser. Ctrl-C ends it.", markup=False, soft_wrap=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
