"""`rl-plugins new`: a package with one method that works, its card, its tests, and the entry point that names it."""

from __future__ import annotations

import keyword
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rl_plugins.core.errors import ConfigError, did_you_mean, shortened, shown

LONGEST_NAME = 60  # characters; folders and modules are named after it


def new(
    name: Annotated[str, typer.Argument(help="Name of the method, e.g. my_method.")],
    hook: Annotated[list[str] | None, typer.Option(help="Hook to start with; may be repeated.")] = None,
    into: Annotated[Path, typer.Option(help="Folder in which the package is made.")] = Path("."),
) -> None:
    """Start a package with a method of your own."""
    from rl_plugins.commands.new.text import files
    from rl_plugins.core.method import HOOKS

    hooks = hook or ["advantages"]
    _check_name(name, hooks)
    for given in hooks:
        if given not in HOOKS:
            raise ConfigError(
                f"`--hook {shortened(given, 80)}`: there is no such hook.{did_you_mean(given, HOOKS)} The hooks are: "
                f"{', '.join(HOOKS)}."
            )
    folder = into / f"rl-plugins-{name.replace('_', '-')}"
    try:
        if folder.exists():
            raise ConfigError(f"The folder {shown(str(folder))} exists already. Choose another name or another --into.")
        for path, text in files(name, [h for h in HOOKS if h in hooks]).items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    except OSError as e:
        raise ConfigError(
            f"The package cannot be made in {shown(str(into))}: {e.strerror or e}. Give --into a folder that can be "
            f"written."
        ) from None
    print(f"Made {folder} with a method that works. Next:\n  pip install -e {folder} pytest")
    print(f"  rl-plugins check {name}   # after every change\n  pytest {folder}")
    print(f"Then name it in a run, methods: [{name}]. The README in the folder says what to write where.")


def _check_name(name: str, hooks: Sequence[str]) -> None:
    from rl_plugins.commands.new.parts import PARTS
    from rl_plugins.commands.new.text import class_name
    from rl_plugins.runtime import registry

    if not re.fullmatch(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", name):
        raise ConfigError(
            f"{shown(name, 80)} cannot be the name of a method: lower-case letters, digits and single underscores "
            f"only, a letter first, e.g. my_method."
        )
    if len(name) > LONGEST_NAME:
        raise ConfigError(f"The name {shown(name, 80)} has {len(name)} characters; {LONGEST_NAME} are the most.")
    cls = class_name(name)
    used = {"Method", "MethodParams", "Tensor"}
    used |= {n for hook in hooks if hook in PARTS for n in (*PARTS[hook].names, *PARTS[hook].test_names)}
    if keyword.iskeyword(cls) or cls in used:
        raise ConfigError(
            f"The class of `{name}` would be called {cls}, which has a meaning of its own. Choose another."
        )
    taken = {*registry.all_names(), *registry.BASELINES}
    if name in taken:
        origin = next((str(o) for o in registry.origins_of(name)), "rl-plugins itself")
        raise ConfigError(f"The name `{name}` is taken by {origin}. Choose another one.")
