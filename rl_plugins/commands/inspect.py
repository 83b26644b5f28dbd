"""`rl-plugins inspect`: a trace as a page, or in the terminal."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_plugins.core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from rl_plugins.lab.viewer.folder import TraceFolder


def inspect(
    run: Annotated[Path, typer.Argument(help="Folder of a run that was made with `trace: true`, or one above it.")],
    batch: Annotated[int | None, typer.Option(help="Generation batch whose groups are listed.", min=0)] = None,
    group: Annotated[int | None, typer.Option(help="Group of the batch whose rollouts are shown.")] = None,
    compare: Annotated[
        Path | None, typer.Option(help="Other run to compare with; the same one compares its batches.")
    ] = None,
    other_batch: Annotated[int | None, typer.Option(help="Batch of the other run.", min=0)] = None,
    prompt: Annotated[int | None, typer.Option(help="Dataset row whose rollouts are compared.", min=0)] = None,
    html: Annotated[Path | None, typer.Option(help="Folder for a page that opens without a server.")] = None,
    last: Annotated[
        int | None, typer.Option(help="Newest batches whose groups are on the page of --html.", min=1)
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page on this machine, for large traces.")] = False,
    port: Annotated[int, typer.Option(help="Port of --serve; 0: a free one.", min=0, max=65535)] = 0,
) -> None:
    """Look at the trace of a run: batches, the groups of one, and what became of each rollout and why.

    Without options it prints the batches. --html writes a page with curves, tables and texts, --serve shows it.

    --compare shows the same prompts under two policies, and where their texts differ.

    A run writes a trace if its config says `trace: true` (TRL) or `+rl_plugins.trace=true` (verl).
    """
    if group is not None and batch is None:
        raise ConfigError(f"--group {group} is given without a batch. Say which one: --batch N --group {group}")
    if (html is not None) + serve + (batch is not None) > 1:
        raise ConfigError("--batch, --html and --serve show the trace in three ways. Give one of them.")
    if last is not None and html is None:
        raise ConfigError(f"--last {last} is of a page. Give --html FOLDER, too.")
    if compare is None and (other_batch is not None or prompt is not None):
        raise ConfigError("--other-batch and --prompt belong to a comparison. Give --compare RUN, too.")
    if compare is not None and group is not None:
        raise ConfigError(f"--group {group} is of one run. In a comparison, give --prompt N, a dataset row.")
    from rich.console import Console

    from rl_plugins.lab.viewer.comparison import pair_of, pairs
    from rl_plugins.lab.viewer.folder import TraceFolder
    from rl_plugins.lab.viewer.page import LARGEST, page_size, write_page
    from rl_plugins.lab.viewer.terminal import print_batch, print_group, print_pair, print_pairs, print_run
    from rl_plugins.runtime.bars import tracked

    wide = None if sys.stdout.isatty() or "COLUMNS" in os.environ else 160  # in a file or a pipe rich takes 80
    trace, console = TraceFolder(run, last), Console(highlight=False, width=wide)
    other = TraceFolder(compare, last) if compare is not None else None
    second = None if other is None or other.path == trace.path else other
    if html is not None:
        written = [trace, *([second] if second else [])]
        count = sum(len(t.recorded) for t in written)
        size, seconds = map(sum, zip(*map(page_size, written), strict=True))
        about = f"{count} batches, about {size / 1e6:,.0f} MB in {seconds:,.0f} s"
        if size > LARGEST and last is None:
            raise ConfigError(
                f"The page would be large: {about}. Up to {LARGEST / 1e6:,.0f} MB are written without --last. Give "
                f"--last {max(1, int(len(trace.recorded) * LARGEST / size))}, which is about as much, or any other "
                f"number of batches, or use --serve, which writes nothing."
            )
        console.print(f"The page: {about}.", markup=False, soft_wrap=True)
        for _ in tracked(write_page(trace, html, second), "Writing the page", console, count):
            pass
        console.print(f"Open {html / 'index.html'} in a browser.", markup=False, soft_wrap=True)
    elif serve:
        _serve(trace, port, second, console)
    elif other is not None:
        found = pairs(trace, other, batch, other_batch)
        if prompt is None:
            print_pairs(trace, other, found, console)
        else:
            print_pair(trace, other, pair_of(found, prompt), console)
    elif batch is None:
        print_run(trace, console)
        console.print(f"As a page: rl-plugins inspect {run} --html page, or --serve.", markup=False, soft_wrap=True)
    elif group is None:
        print_batch(trace, batch, console)
    else:
        print_group(trace, batch, group, console)


def _serve(trace: TraceFolder, port: int, other: TraceFolder | None, console: Console) -> None:
    from rl_plugins.lab.viewer.serve import PageServer

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
