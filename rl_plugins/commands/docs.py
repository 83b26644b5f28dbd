"""`rl-plugins docs`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def docs(
    root: Annotated[Path, typer.Argument(help="Folder of a checkout.")] = Path("."),
    check: Annotated[
        bool, typer.Option("--check", help="Check the pages and change nothing; status 1 if one is old.")
    ] = False,
) -> None:
    """Write every page that is made from the code."""
    from rl_plugins.lab import pages

    stale = pages.write(root, dry=check)
    for page in stale:
        typer.echo(page)
    raise typer.Exit(int(check and bool(stale)))
