"""`rl-plugins info`."""

from __future__ import annotations

from typing import Annotated

import typer

from rl_plugins.core.errors import ConfigError


def _names(begun: str) -> list[str]:
    """What a shell completes."""
    from rl_plugins.cards.problems import ANSWERS
    from rl_plugins.runtime import registry

    names = [*registry.all_names(), *(answer.name for answer in ANSWERS)]
    return [name for name in names if name.startswith(begun)]


def info(
    methods: Annotated[
        list[str],
        typer.Argument(
            metavar="METHOD...",
            help="A method, a bundle, or an option that `suggest` names; or several methods.",
            autocompletion=_names,
        ),
    ],
    everything: Annotated[
        bool,
        typer.Option("--all", help="Print also the update rule, all measurements, logs, sources and the citation."),
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: everything.")] = False,
) -> None:
    """Show whether to use a method, what it costs, and lines to copy. Of several: whether they go together in a run."""
    from rl_plugins.commands.shared.late_torch import late_torch

    late_torch()
    from rl_plugins.cards.info import print_info, print_together

    names = list(dict.fromkeys(methods))
    if len(names) == 1:
        print_info(names[0], as_json, everything)
    elif everything:
        raise ConfigError("--all is for one name. Give one, or leave --all out to see whether they go together.")
    else:
        print_together(names, as_json)
