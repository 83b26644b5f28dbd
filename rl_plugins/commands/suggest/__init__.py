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
    config: Annotated[
        Path | None, typer.Argument(help="YAML config of a run of TRL: what it lacks for a method is named.")
    ] = None,
    text: Annotated[
        str | None,
        typer.Option("--for", help='What you see, in your words or those of a log: "groups of equal rewards".'),
    ] = None,
    logs: Annotated[
        Path | None, typer.Option(help="Logs of a run: its folder, trainer_state.json, or a .jsonl file.")
    ] = None,
    host: Annotated[
        HostName | None, typer.Option(help="Host of the run.", show_default="that of the logs, or trl")
    ] = None,
    answers: Annotated[
        bool, typer.Option("--answers", help="Print all there is, a line each, for a language model to choose from.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Suggest what helps with the problem of a run: methods, options of the host, commands.

    Without --for and --logs it asks, if it runs in a terminal. --for searches by words: where you ask a language model
    for help anyway, give it what --answers prints, and your problem.
    """
    from rl_plugins.commands.shared.late_torch import late_torch

    late_torch()
    from rl_plugins.commands.suggest import advice, shown
    from rl_plugins.commands.suggest.run_logs import read_logs
    from rl_plugins.runtime.config_text import read_yaml

    if answers:
        print(shown.everything(host))
        return
    if config is not None and not config.is_file() and " " in str(config):
        raise ConfigError(f"There is no config `{config}`. A sentence follows --for: suggest --for {str(config)!r}")
    if text is None and logs is None and not in_terminal():
        raise ConfigError(
            f'Nothing is given. Say what you see (--for "..."), or give logs (--logs PATH). {advice.known()}'
        )
    run = None if config is None else read_yaml(config, f"The config {config}") or {}
    asked = advice.Asked(host or (HostName.trl if config else None), run)
    if logs is not None:
        answer = advice.from_logs(read_logs(logs), asked)
        if text is not None:
            said = advice.from_text(text, replace(asked, host=answer.host))
            together = advice.joined([*said.suggestions, *answer.suggestions])
            answer = replace(answer, nearest=said.nearest, suggestions=together)
    elif text is not None:
        answer = advice.from_text(text, asked)
    else:
        answer = advice.from_questions(asked)
    print(json.dumps(shown.plain(answer), indent=2) if as_json else shown.shown(answer))


def in_terminal() -> bool:
    """Whether somebody can answer questions."""
    return sys.stdin.isatty() and sys.stdout.isatty()
