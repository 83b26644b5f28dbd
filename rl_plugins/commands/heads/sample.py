"""`rl-plugins heads sample`: a fixed budget of samples over heads, and what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
    from rich.console import Console
    from rich.table import Table

    from rl_plugins.commands.heads.sampling import SOLVED, SampleBudget, sample_heads

    budget = SampleBudget(k, split, limit, reward, threshold, batch, seed)
    summary = sample_heads(config, heads or [], budget, out)
    table = Table("Head", "Samples", "Solved", "Tokens each", box=None, pad_edge=False)
    for head, found in summary["heads"].items():
        table.add_row(head, str(found["samples"]), f"{found['success']:.3f}", f"{found['tokens']:.1f}")
    Console(soft_wrap=False).print(table)
    spread = "none" if summary["pdc"] is None else f"{summary['pdc']:.3f}"
    print(f"\n{summary['problems']} problems, k = {k}")
    print(f"pass@{k}            {summary['pass']:.3f}")
    print(f"tokens per problem  {summary['tokens_per_problem']:.1f}")
    print(f"PDC                 {spread}")
    print(f"Written: {out / 'summary.json'}, {out / 'samples.jsonl'}, {out / 'dataset'} (column `{SOLVED}`)")
