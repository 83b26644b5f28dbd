"""`rl-plugins schema`."""

from __future__ import annotations

import json

import typer


def schema() -> None:
    """Print the JSON schema of a YAML config, from which editors complete methods and their parameters.

    \b
    For the YAML extension of VS Code, in the first line of the config:
      # yaml-language-server: $schema=rl-plugins.schema.json
    """
    from rl_plugins.cards.schema import config_schema

    typer.echo(json.dumps(config_schema(), indent=2))
