"""`rl-plugins heads`: writes the runs that train several heads of one model, and samples over the heads."""

from __future__ import annotations

import typer

from rl_plugins.commands.heads.sample import sample
from rl_plugins.commands.heads.write import write
from rl_plugins.commands.shared.options import LOOK

app = typer.Typer(help="Train several small heads of one model, and sample over them.", **LOOK)
app.command()(write)
app.command()(sample)
