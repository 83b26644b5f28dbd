"""`rl-plugins list`."""

from __future__ import annotations

from typing import Annotated

import typer


def list_methods(
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    hooks: Annotated[bool, typer.Option("--hooks", help="Show the hooks, papers and hosts instead.")] = False,
) -> None:
    """List all methods and bundles by the problem they answer."""
    from rl_plugins.cards.listing import print_list

    print_list(json, hooks)
