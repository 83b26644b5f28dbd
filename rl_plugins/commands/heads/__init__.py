"""`rl-plugins heads`: writes the runs that train several heads of one model, and samples over the heads."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    help="Train several small heads of one model, and sample over them.",
    rich_markup_mode=None,
    no_args_is_help=True,
    add_completion=False,
)


class _Host(enum.StrEnum):
    trl = "trl"
    verl = "verl"


class _Adapter(enum.StrEnum):
    lora = "lora"
    prompt_tuning = "prompt_tuning"
    prefix_tuning = "prefix_tuning"


@app.command()
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
    adapter: Annotated[_Adapter, typer.Option(help="Adapter of PEFT that is a head.")] = _Adapter.lora,
    virtual_tokens: Annotated[
        int, typer.Option(min=1, help="Number of trained vectors, of prompt and prefix tuning.")
    ] = 20,
    text: Annotated[str | None, typer.Option(help="Text that prompt and prefix tuning start from.")] = None,
    host: Annotated[_Host, typer.Option(help="Host of the runs.")] = _Host.trl,
    out: Annotated[Path, typer.Option(help="Folder for a file per head.")] = Path("heads"),
    force: Annotated[bool, typer.Option("--force", help="Replace files.")] = False,
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
    from rl_plugins.commands.heads.write import Heads, write_runs

    made = Heads(heads, column, adapter.value, virtual_tokens, text)
    write_runs(words or [], made, host.value, out, force)


@app.command()
def sample(
    config: Annotated[Path, typer.Argument(help="YAML config of `trl grpo`: model, dataset, rewards, limits.")],
    heads: Annotated[
        list[Path] | None,
        typer.Argument(metavar="[HEAD...]", help="Folders of adapters of that model; none: the model."),
    ] = None,
    k: Annotated[int, typer.Option("--k", min=1, help="Number of samples per problem, of all heads together.")] = 16,
    out: Annotated[Path, typer.Option(help="Folder of the samples; a run that was cut off goes on there.")] = Path(
        "head-samples"
    ),
    split: Annotated[str, typer.Option(help="Split of the dataset.")] = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="Number of problems.", show_default="all")] = None,
    reward: Annotated[
        str, typer.Option(help="Reward function that says what is solved.", show_default="weighted sum")
    ] = "",
    threshold: Annotated[float, typer.Option(help="Lowest reward that counts as solved.")] = 0.5,
    batch: Annotated[int, typer.Option(min=1, help="Number of sequences that are generated together.")] = 64,
    seed: Annotated[int, typer.Option(help="Seed of the samples.")] = 0,
) -> None:
    """Draw a fixed budget of samples over heads, and print pass@k, tokens and how alike samples begin.

    Each head makes k / n samples of a problem. What is left of k goes to one head after the other, problem by problem.
    With fewer samples than heads the heads take turns. The model and the heads are not changed.

    pass@k is the share of problems of which a sample is solved. PDC, prefix diversity coverage, is the number of
    different 3-grams among the first 20 tokens of a problem's samples, divided by the number of 3-grams there; the mean
    over the problems is printed. Both take the whole budget: compare numbers of the same k only.

    The folder `dataset` in --out has the problems with the column `solved`: how many of their samples are. Of the model
    alone, with --split train and --k 32, that is the column for `heads write`.

    \b
    Eight heads, and the model alone at the same budget:
      rl-plugins heads sample run.yaml heads/out/head_* --k 16 --out eight
      rl-plugins heads sample run.yaml --k 16 --out alone
    """
    from rl_plugins.commands.heads.sample import SampleBudget, sample_heads

    sample_heads(config, heads or [], SampleBudget(k, split, limit, reward, threshold, batch, seed), out)
