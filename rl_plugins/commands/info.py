"""`rl-plugins info`."""

from __future__ import annotations

from typing import Annotated

import typer


def _names(begun: str) -> list[str]:
    """What a shell completes."""
    from rl_plugins.runtime import registry

    return [name for name in registry.all_names() if name.startswith(begun)]


def info(
    method: Annotated[str, typer.Argument(help="Name of a method or bundle.", autocompletion=_names)],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show everything about one method: update rule, parameters, costs, measurements, how to use it."""
    from rl_plugins.commands.shared.late_torch import late_torch

    late_torch()
    from rl_plugins.cards.info import print_info

    print_info(method, json)
