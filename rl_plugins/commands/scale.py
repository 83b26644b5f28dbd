"""`rl-plugins scale`: the config of a run with more samples per batch, by the recipe of arXiv 2603.06009.

What a host calls an option, and what it counts in batches, is in the adapters: `rl_plugins.trl.commands.scale` and
`rl_plugins.verl.scale`.
"""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rl_plugins.commands.shared.options import Force, HostName, OfRun, WorldSize
from rl_plugins.commands.shared.overrides import with_overrides, words_of
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import write_text

if TYPE_CHECKING:
    from rich.console import Console

    from rl_plugins.runtime.scaling import Scaled


def scale(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG | -- OVERRIDES...",
            help="YAML config of `trl grpo`; with --host verl a YAML file, a file with the command, or overrides.",
            show_default=False,
        ),
    ] = None,
    by: Annotated[int, typer.Option("--by", min=1, help="Factor on the samples per batch.")] = 2,
    host: OfRun = HostName.trl,
    out: Annotated[Path | None, typer.Option(help="File of the new config.", show_default="stdout")] = None,
    force: Force = False,
    world_size: WorldSize = None,
) -> None:
    """Write the config of a run with more samples per batch, and say what changed and why.

    Use it before a run whose reward would stop rising, or to go on from a checkpoint's weights with larger batches. The
    recipe is that of arXiv 2603.06009: the mini-batch, the learning rate, the epochs and the clip range stay, so the
    number of optimizer steps per batch grows. Do not raise the learning rate with the batch. What the host counts in
    batches (length of the run, intervals, verl's schedule) is divided, so that it still counts the same samples. A
    batch must be a whole number of mini-batches.

    \b
    A run of TRL; the table goes to stdout, or to stderr where the config goes to stdout:
      rl-plugins scale run.yaml --by 4 --out larger.yaml
      rl-plugins trl grpo --config larger.yaml --dry-run

    \b
    A run of verl, by its overrides or a file:
      rl-plugins scale --host verl --by 4 --out larger.txt -- data.train_batch_size=64 ...
      rl-plugins scale command.txt --host verl --by 4 --out larger.txt
      xargs -a larger.txt python -m verl.trainer.main_ppo

    The method `ppo_million` logs how many samples a run has per unit of KL: `rl-plugins info ppo_million`.
    """
    from rich.console import Console

    if out is not None and out.exists() and not force:
        raise ConfigError(f"--out {out} exists. Nothing was written. Give another file, or --force to replace it.")
    text, scaled = _verl(words or [], by, world_size) if host == HostName.verl else _trl(words or [], by, world_size)
    _print(scaled, by, Console(stderr=out is None, soft_wrap=False))
    if out is None:
        sys.stdout.write(text)
    else:
        write_text(out, text)
        print(f"\nWritten: {out}")


def _trl(words: Sequence[str], by: int, world_size: int | None) -> tuple[str, Scaled]:
    if len(words) != 1:
        raise ConfigError(
            "A run of TRL is scaled by its config file alone. Give it: rl-plugins scale run.yaml --by 4 --out "
            "new.yaml. Overrides are for --host verl."
        )
    from rl_plugins.commands.shared.yaml_edit import with_values
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
    from rl_plugins.commands.shared.yaml_edit import with_values
    from rl_plugins.runtime.config_text import read_yaml
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


def _print(scaled: Scaled, by: int, console: Console) -> None:
    from rich.table import Table

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
