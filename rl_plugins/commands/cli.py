"""The command `rl-plugins`: every command of this folder, and what becomes of an error."""

from __future__ import annotations

import importlib.metadata
import io
import os
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from rl_plugins.commands import heads, trl
from rl_plugins.commands.audit import audit
from rl_plugins.commands.bench import bench
from rl_plugins.commands.check import check
from rl_plugins.commands.compare import compare
from rl_plugins.commands.demo import demo
from rl_plugins.commands.docs import docs
from rl_plugins.commands.doctor import doctor
from rl_plugins.commands.export import export
from rl_plugins.commands.fuse import fuse
from rl_plugins.commands.info import info
from rl_plugins.commands.inspect import inspect
from rl_plugins.commands.list import list_methods
from rl_plugins.commands.mode_pairs import mode_pairs
from rl_plugins.commands.new import new
from rl_plugins.commands.probe import probe
from rl_plugins.commands.scale import scale
from rl_plugins.commands.schema import schema
from rl_plugins.commands.shared.options import LOOK
from rl_plugins.commands.suggest import suggest
from rl_plugins.commands.train_adapter import train_adapter
from rl_plugins.core.errors import RLPluginsError, missing_package, printable


class _Commands(TyperGroup):
    """Turns errors of rl-plugins, a host or an extra that is not installed, and paths that cannot be read or written
    into one paragraph on stderr and exit status 2. An error of the user's code keeps its traceback, and so does
    everything while a model trains."""

    def invoke(self, ctx: Any) -> Any:
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(line_buffering=True)  # a file shows at once what a terminal shows
        try:
            return super().invoke(ctx)
        except RLPluginsError as e:
            told = str(e)
        except ImportError as e:
            told = missing_package(e)
            if not told:
                raise
        except OSError as e:
            if e.filename is None or ctx.invoked_subcommand == "trl":
                raise
            told = f"{printable(os.fspath(e.filename))}: {e.strerror}. Give a path that can be read or written."
        typer.echo(f"rl-plugins: {told}", err=True)
        raise typer.Exit(2)


app = typer.Typer(cls=_Commands, pretty_exceptions_enable=False, **{**LOOK, "add_completion": True})
app.add_typer(trl.app, name="trl")
app.add_typer(heads.app, name="heads")


def _version(asked: bool) -> None:
    if asked:
        from rl_plugins.core.version import full_version
        from rl_plugins.runtime.tested import wanted

        typer.echo(f"rl-plugins {full_version()}")
        for host in ("trl", "verl"):
            try:
                version = importlib.metadata.version(host)
            except importlib.metadata.PackageNotFoundError:
                version = "not installed"
            typer.echo(f"{host} {version} (allowed: {wanted(host)})")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions.")
    ] = False,
) -> None:
    """Run methods of RL post-training papers as plugins of TRL and verl.

    Files that messages name, such as docs/audit.md or patches/README.md, are in the folder that rl-plugins was
    installed from, a clone or a source archive. The package has none of them; info METHOD says what it knows.
    """


_OPTIONS_OF_HOST = {"ignore_unknown_options": True}  # they go on to the host

app.command("list")(list_methods)
app.command()(info)
app.command()(suggest)
app.command()(check)
app.command()(new)
app.command()(train_adapter)
app.command()(fuse)
app.command()(mode_pairs)
app.command()(doctor)
app.command(context_settings=_OPTIONS_OF_HOST)(audit)
app.command()(inspect)
app.command()(demo)
app.command(context_settings=_OPTIONS_OF_HOST)(compare)
app.command(context_settings=_OPTIONS_OF_HOST)(probe)
app.command()(bench)
app.command()(scale)
app.command()(export)
app.command()(schema)
app.command(hidden=True)(docs)


if __name__ == "__main__":
    app()
