"""`rl-plugins scale`: the config of a run with more samples per batch, by the recipe of arXiv 2603.06009.

Mini-batch, learning rate, epochs and clip range stay, so the number of optimizer steps per batch grows. What a host
calls that, and what it counts in batches, is in the adapters: `rl_plugins.trl.commands.scale` and `rl_plugins.verl.scale`.
"""

from __future__ import annotations

import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from rl_plugins.commands.yaml_edit import with_values
from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.runtime.config_text import read_yaml
from rl_plugins.runtime.scaling import Scaled


def scale(words: Sequence[str], by: int, host: str, out: Path | None, force: bool, world_size: int | None) -> None:
    """Writes the new config and prints what it changed.

    Args:
        words: a file, or overrides of verl.
        out: None: the config goes to stdout, the table to stderr.

    Raises:
        ConfigError: the config cannot be read or scaled, or `out` exists and `force` is not given.
    """
    if out is not None and out.exists() and not force:
        raise ConfigError(f"--out {out} exists. Nothing was written. Give another file, or --force to replace it.")
    text, scaled = _verl(words, by, world_size) if host == "verl" else _trl(words, by, world_size)
    _print(scaled, by, Console(stderr=out is None, soft_wrap=False))
    if out is None:
        sys.stdout.write(text)
    else:
        out.write_text(text, encoding="utf-8")
        print(f"\nWritten: {out}")


def _trl(words: Sequence[str], by: int, world_size: int | None) -> tuple[str, Scaled]:
    if len(words) != 1:
        raise ConfigError(
            "A run of TRL is scaled by its config file alone. Give it: rl-plugins scale run.yaml --by 4 --out "
            "new.yaml. Overrides are for --host verl."
        )
    from rl_plugins.trl.commands import scale as adapter

    config = Path(words[0])
    scaled = adapter.scaled(config, by, world_size)
    text = with_values(config.read_text(encoding="utf-8"), scaled.values)
    with tempfile.TemporaryDirectory() as folder:
        new = Path(folder) / "new.yaml"
        new.write_text(text, encoding="utf-8")
        adapter.check(config, new, by, world_size)
    return text, scaled


def _verl(words: Sequence[str], by: int, world_size: int | None) -> tuple[str, Scaled]:
    if world_size is not None:
        raise ConfigError("--world-size is for TRL; verl's batch does not depend on it. Leave it out.")
    if not words:
        raise ConfigError(
            "Give a run of verl as one file or as overrides: rl-plugins scale run.yaml --host verl --by 4, or "
            "rl-plugins scale --host verl --by 4 -- data.train_batch_size=64 OVERRIDES"
        )
    from rl_plugins.verl import scale as adapter
    from rl_plugins.verl.config import compose
    from rl_plugins.verl.doctor import read_command

    listed = False
    if len(words) == 1 and "=" not in words[0]:
        config = Path(words[0])
        found = (
            words_of(config) if config.suffix not in (".yaml", ".yml") else read_yaml(config, f"The config {config}")
        )
        if isinstance(found, Mapping):
            scaled = adapter.scaled(adapter.config_of(found), by)
            return with_values(config.read_text(encoding="utf-8"), scaled.values), scaled
        if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
            raise ConfigError(
                f"The config {config} holds neither options of verl nor a list of overrides. Give a YAML mapping, or a "
                f"list like hydra's .hydra/overrides.yaml."
            )
        words, listed = found, config.suffix in (".yaml", ".yml")
    overrides = read_command(words)
    scaled = adapter.scaled(compose(overrides), by)
    new = with_overrides(overrides, scaled.values)
    if listed:
        import yaml

        return yaml.safe_dump(new, width=10_000), scaled
    return "".join(f"{shlex.quote(word)}\n" for word in new), scaled


def words_of(file: Path) -> list[str]:
    """The words of a file with a command of verl or with its overrides."""
    try:
        words = shlex.split(file.read_text(encoding="utf-8").replace("\\\n", " "), comments=True)
    except (OSError, ValueError) as e:
        raise ConfigError(f"{file} cannot be read: {e}. Give a YAML file, or a file with overrides.") from None
    variables = [word for word in words if "$" in word and word != "$@"]
    if variables:
        raise ConfigError(
            f"{file} is a shell script with variables ({shown(variables[0])}). Only a plain command or its overrides "
            f"can be read. Give the words that the shell makes of them: --host verl -- OVERRIDES"
        )
    return words


def with_overrides(words: Sequence[str], values: Mapping[str, Any]) -> list[str]:
    """Overrides of hydra with other values: the last one of a name is replaced, a new name comes last."""
    new = list(words)
    for name, value in values.items():
        places = [i for i, word in enumerate(new) if re.match(rf"\+{{0,2}}{re.escape(name)}=", word)]
        if places:
            new[places[-1]] = f"{new[places[-1]].partition('=')[0]}={value}"
        else:
            new.append(f"{name}={value}")
    return new


def _print(scaled: Scaled, by: int, console: Console) -> None:
    if not scaled.settings:
        console.print(f"Nothing to change for --by {by}.")
    else:
        table = Table("Option", "Before", "After", "Why", box=None, pad_edge=False)
        for s in scaled.settings:
            table.add_row(s.option, "not set" if s.before is None else str(s.before), str(s.after), s.why)
        console.print(table)
    console.print(f"\n{scaled.batch}", highlight=False)
    kept = ", ".join(f"{name}={value}" for name, value in scaled.kept.items())
    console.print(f"Kept: {kept}. The learning rate is not raised with the batch.", highlight=False)
    for note in scaled.notes:
        console.print(f"- {note}", highlight=False)
