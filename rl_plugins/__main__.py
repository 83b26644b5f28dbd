"""`python -m rl_plugins` is `rl-plugins`."""

from rl_plugins.commands.cli import app

app(prog_name="rl-plugins")
