"""`rl-plugins heads write`: a run per head, from the run of the user."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from rl_plugins.commands.shared.options import Force, HostName, OfRun
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import write_text


class AdapterKind(enum.StrEnum):
    """Adapters of PEFT that can be a head."""

    lora = "lora"
    prompt_tuning = "prompt_tuning"
    prefix_tuning = "prefix_tuning"


def write(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG | -- OVERRIDES...",
            help="YAML config of `trl grpo`; with --host verl a file with the command, or overrides.",
            show_default=False,
        ),
    ] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, help="Number of heads.")] = 8,
    column: Annotated[
        str,
        typer.Option(help="Dataset column with the base policy's successes.", show_default="rollouts of each run"),
    ] = "",
    adapter: Annotated[AdapterKind, typer.Option(help="Adapter of PEFT that is a head.")] = AdapterKind.lora,
    virtual_tokens: Annotated[
        int, typer.Option(min=1, help="Number of trained vectors, of prompt and prefix tuning.")
    ] = 20,
    text: Annotated[str | None, typer.Option(help="Text that prompt and prefix tuning start from.")] = None,
    host: OfRun = HostName.trl,
    out: Annotated[Path, typer.Option(help="Folder for a file per head.")] = Path("heads"),
    force: Force = False,
) -> None:
    """Write a run per head: yours, with an adapter and the method `difficulty_slices`.

    Head 0 trains half of its batches on the hardest prompts, the last head on the easiest. Everything else stays as in
    your run, the methods included. Each run gets a folder of its own.

    \b
    TRL, with LoRA, or with vectors before the prompt that start from a text:
      rl-plugins heads write run.yaml --heads 8 --column base_successes
      rl-plugins heads write run.yaml --heads 8 --adapter prompt_tuning --text "Let us think."
      rl-plugins trl grpo --config heads/head_0.yaml

    \b
    verl, where LoRA is the only adapter:
      rl-plugins heads write command.txt --host verl --heads 8
      xargs -a heads/head_0.txt python -m verl.trainer.main_ppo

    docs/heads.md has an example, the rate that prompt tuning needs, and our measurement.
    """
    from rich.console import Console
    from rich.table import Table

    from rl_plugins.commands.heads.runs import Heads, trl_runs, verl_runs

    if adapter == AdapterKind.lora and (text is not None or virtual_tokens != 20):
        raise ConfigError(
            "--text and --virtual-tokens are for --adapter prompt_tuning and prefix_tuning; LoRA has no virtual "
            "tokens. Leave them out, or give another --adapter."
        )
    suffix = "txt" if host == HostName.verl else "yaml"
    files = [out / f"head_{head}.{suffix}" for head in range(heads)]
    there = [file for file in files if file.exists()]
    if there and not force:
        raise ConfigError(f"{there[0]} exists. Nothing was written. Give another --out, or --force to replace files.")
    made = Heads(heads, column, adapter.value, virtual_tokens, text)
    texts = verl_runs(words or [], made) if host == HostName.verl else trl_runs(words or [], made)
    for file, content in zip(files, texts, strict=True):
        write_text(file, content)

    console = Console(soft_wrap=False)
    table = Table("Head", "File", "Slice", box=None, pad_edge=False)
    for head, file in enumerate(files):
        place = "the hardest prompts" if head == 0 else "the easiest prompts" if head == heads - 1 else ""
        table.add_row(str(head), str(file), place if heads > 1 else "all prompts")
    console.print(table)
    start = f"rl-plugins trl grpo --config {files[0]}"
    start = f"xargs -a {files[0]} python -m verl.trainer.main_ppo" if host == HostName.verl else start
    print(f"\nStart each head: {start}")
    if not column:
        print("Without --column every run sorts prompts by its own rollouts, so the slices of the heads may overlap.")
    if adapter != AdapterKind.lora and text is None:
        print("Without --text the virtual tokens start at random, which ruins the policy at first.")
