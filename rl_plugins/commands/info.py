"""`rl-plugins info`."""

from __future__ import annotations

from typing import Annotated

import typer


def info(method: Annotated[str, typer.Argument(help="Name of a method or bundle.")]) -> None:
    """Show everything about one method: update rule, parameters, costs, measurements, how to use it."""
    from rl_plugins.commands.shared.late_torch import late_torch

    late_torch()
    from rl_plugins.cards.info import print_info

    print_info(method)
