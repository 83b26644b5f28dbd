"""`rl-plugins export`: one of our methods as a contribution to a host."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_plugins.commands.shared.options import DryRun, Force, HostName
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import write_text

NEXT = {
    "trl": (
        "Write into a checkout of https://github.com/huggingface/trl, then there: `make precommit`, "
        "`pytest {tests}`, and a pull request that names the paper."
    ),
}


def export(
    method: Annotated[str, typer.Argument(help="Method, e.g. vade.")],
    host: Annotated[HostName, typer.Option(help="Host that gets the contribution.")],
    into: Annotated[Path, typer.Option(help="Checkout of the host's repository, or an empty folder.")],
    force: Force = False,
    dry_run: DryRun = False,
) -> None:
    """Write a method as a contribution to a host, without this package.

    \b
    TRL: an experimental trainer with tests, docs page and paper-index entry:
      rl-plugins export vade --host trl --into ~/trl
    """
    from rl_plugins.commands.export.contribution import plan

    if into.exists() and not into.is_dir():
        raise ConfigError(f"--into {into} is a file. Give a folder: a checkout of the host, or a new one.")
    files = plan(method, host, into)
    changed = [f.path for f in files if f.state == "differs"]
    if changed and not force and not dry_run:
        raise ConfigError(
            f"{into} has {', '.join(changed)} with another text. Nothing was written. Give another --into, or "
            f"--force to replace them."
        )
    for file in files:
        print(f"{file.state:10} {into / file.path}")
        if not dry_run and file.state in ("new", "differs", "extended"):
            write_text(into / file.path, file.text)
    for file in files:
        if file.state == "by hand":
            print(f"\nAdd to {file.path} of the host's repository:\n\n{file.text}")
    if dry_run:
        print("Nothing was written (--dry-run).")
        return
    tests = next(file.path for file in files if Path(file.path).name.startswith("test_"))
    print(NEXT[host].format(tests=tests))
