"""`rl-plugins info`."""

from __future__ import annotations

from typing import Annotated

import typer


def _names(begun: str) -> list[str]:
    """What a shell completes."""
    from rl_plugins.cards.problems import ANSWERS
    from rl_plugins.runtime import registry

    names = [*registry.all_names(), *(answer.name for answer in ANSWERS)]
    return [name for name in names if name.startswith(begun)]


def info(
    method: Annotated[
        str,
        typer.Argument(help="Name of a method or bundle, or of an option that `suggest` names.", autocompletion=_names),
    ],
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show whether to use a method, and a line to copy; then its update rule, parameters, measurements and configs."""
    from rl_plugins.commands.shared.late_torch import late_torch

    late_torch()
    from rl_plugins.cards.info import print_info

    print_info(method, json)
