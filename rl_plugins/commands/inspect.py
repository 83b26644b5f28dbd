"""`rl-plugins inspect`: a trace as a page, or in the terminal."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import track

from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.viewer.comparison import pair_of, pairs
from rl_plugins.lab.viewer.folder import TraceFolder
from rl_plugins.lab.viewer.page import write_page
from rl_plugins.lab.viewer.serve import PageServer
from rl_plugins.lab.viewer.terminal import print_batch, print_group, print_pair, print_pairs, print_run


@dataclass(frozen=True)
class Wanted:
    """What is shown, and how.

    Args:
        batch, group: of the run; prompt: dataset row of a comparison.
        compare: another run, or the same one; other_batch: its batch.
        html: folder of a page; serve: show it; port: of the server.
    """

    batch: int | None = None
    group: int | None = None
    compare: Path | None = None
    other_batch: int | None = None
    prompt: int | None = None
    html: Path | None = None
    serve: bool = False
    port: int = 0

    def check(self) -> None:
        """Raises:
        ConfigError: options that need or exclude each other.
        """
        if self.group is not None and self.batch is None:
            raise ConfigError(
                f"--group {self.group} is given without a batch. Say which one: --batch N --group {self.group}"
            )
        if (self.html is not None) + self.serve + (self.batch is not None) > 1:
            raise ConfigError("--batch, --html and --serve show the trace in three ways. Give one of them.")
        if self.compare is None and (self.other_batch is not None or self.prompt is not None):
            raise ConfigError("--other-batch and --prompt belong to a comparison. Give --compare RUN, too.")
        if self.compare is not None and self.group is not None:
            raise ConfigError(f"--group {self.group} is of one run. In a comparison, give --prompt N, a dataset row.")


def show(run: Path, wanted: Wanted) -> None:
    """Prints the batches of a trace, the groups of a batch, the rollouts of a group, or a comparison; or makes a page.

    Raises:
        ConfigError: there is no trace, not what is asked for, or options that exclude each other.
    """
    wanted.check()
    trace, console = TraceFolder(run), Console(highlight=False)
    other = TraceFolder(wanted.compare) if wanted.compare is not None else None
    beside = None if other is None or other.path == trace.path else other
    if wanted.html is not None:
        count = len(trace.recorded) + (len(beside.recorded) if beside else 0)
        for _ in track(write_page(trace, wanted.html, beside), "Writing the page", count, console=console):
            pass
        console.print(f"Open {wanted.html / 'index.html'} in a browser.", markup=False, soft_wrap=True)
    elif wanted.serve:
        _serve(trace, wanted.port, beside, console)
    elif other is not None:
        found = pairs(trace, other, wanted.batch, wanted.other_batch)
        if wanted.prompt is None:
            print_pairs(trace, other, found, console)
        else:
            print_pair(trace, other, pair_of(found, wanted.prompt), console)
    elif wanted.batch is None:
        print_run(trace, console)
        console.print(f"As a page: rl-plugins inspect {run} --html page, or --serve.", markup=False, soft_wrap=True)
    elif wanted.group is None:
        print_batch(trace, wanted.batch, console)
    else:
        print_group(trace, wanted.batch, wanted.group, console)


def _serve(trace: TraceFolder, port: int, other: TraceFolder | None, console: Console) -> None:
    try:
        server = PageServer(trace, port, other)
    except OSError as e:
        raise ConfigError(f"Port {port} cannot be used: {e.strerror}. Give another one, or none: --port 0") from None
    console.print(f"Open {server.url} in a browser. Ctrl-C ends it.", markup=False, soft_wrap=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        pass
    finally:
        server.server_close()
