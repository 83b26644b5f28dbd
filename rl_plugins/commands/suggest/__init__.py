"""`rl-plugins suggest`: the problems of a run, and the methods for them."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from rl_plugins.commands.shared.options import HostName
from rl_plugins.core.errors import ConfigError


def suggest(
    text: Annotated[str | None, typer.Option("--for", help='Problem in your words: "groups of equal rewards".')] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Logs of a run: its folder, trainer_state.json, or a .jsonl file.")
    ] = None,
    host: Annotated[
        HostName | None, typer.Option(help="Host of the run.", show_default="that of the logs, or trl")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Suggest methods for the problem of a run.

    Without --for and --logs it asks, if it runs in a terminal.
    """
    from rl_plugins.commands.shared.late_torch import late_torch

    late_torch()
    from rl_plugins.commands.suggest import advice
    from rl_plugins.commands.suggest.run_logs import read_logs

    if text is None and logs is None and not in_terminal():
        raise ConfigError(
            f'Nothing is given. Say what you see (--for "..."), or give logs (--logs PATH). {advice.known()}'
        )
    if logs is not None:
        answer = advice.from_logs(read_logs(logs), host)
        if text is not None:
            said = advice.from_text(text, answer.host)
            answer = replace(answer, suggestions=advice.joined([*said.suggestions, *answer.suggestions]))
    elif text is not None:
        answer = advice.from_text(text, host or HostName.trl)
    else:
        answer = advice.from_questions(host)
    print(json.dumps(advice.plain(answer), indent=2) if as_json else advice.shown(answer))


def in_terminal() -> bool:
    """Whether somebody can answer questions."""
    return sys.stdin.isatty() and sys.stdout.isatty()
