"""`rl-plugins fuse`: experts that were trained from one base become one model, folder by folder, tensor by tensor."""

from __future__ import annotations

import enum
from pathlib import Path
from typing import Annotated

import typer

from rl_plugins.commands.shared.options import DryRun


class WeightRule(enum.StrEnum):
    """Weights of the experts."""

    equal = "equal"
    sce = "sce"


def fuse(
    base: Annotated[Path, typer.Argument(help="Model folder that all experts were trained from.")],
    experts: Annotated[
        list[str],
        typer.Argument(metavar="EXPERT...", help="Model folders, or NAME=FOLDER. The name is part of the seed."),
    ],
    out: Annotated[Path, typer.Option(help="Folder that is written. It must not exist, or be empty.")],
    normalize: Annotated[
        bool, typer.Option(help="Make the L2 norms of the experts' deltas equal, tensor by tensor [inferred].")
    ] = True,
    keep: Annotated[float, typer.Option(help="Probability that an element survives the dropout [inferred].")] = 0.9,
    select_topk: Annotated[
        float, typer.Option(help="Share of elements that stay, by variance over experts; 1 is all [inferred].")
    ] = 1.0,
    erase: Annotated[bool, typer.Option(help="Drop signs against the majority, element by element.")] = True,
    weights: Annotated[
        WeightRule, typer.Option(help="Weights of the experts: equal, or SCE's, by mean square [inferred].")
    ] = WeightRule.equal,
    seed: Annotated[int, typer.Option(help="Seed of the dropout.")] = 0,
    dry_run: DryRun = False,
) -> None:
    """Fuse experts that were trained from one base into one model (DORA, arXiv 2509.18883).

    \b
    What an expert learned is its delta: expert - base. The steps for every tensor:
      1. Normalize: deltas of all experts get the same size.
      2. Dropout: each element survives with probability --keep and is divided by it (DARE).
      3. Select: elements on which the experts agree are dropped, with --select-topk below 1 (SCE).
      4. Erase: elements whose sign is not that of the sum over experts are dropped (SCE).
      5. Combine: base + weighted mean of the deltas that survived.

    The paper names steps 1, 2 and 4. It does not state what is marked [inferred]; these values are ours.

    Folders hold safetensors files as `save_pretrained` writes them, sharded or not. Memory holds one tensor per expert
    in float32, and one more with --select-topk below 1. The same seed and names give the same bytes. Dtype, files,
    config and tokenizer are those of the base. Tensors of integers are copied from the base.

    \b
    Look first, then fuse:
      rl-plugins fuse sft math=runs/math code=runs/code --out fused --dry-run
      rl-plugins fuse sft math=runs/math code=runs/code --out fused

    \b
    The plain mean of the experts:
      rl-plugins fuse sft math=runs/math code=runs/code --out mean --no-normalize --keep 1 --no-erase

    docs/fusion.md has an example by hand, memory and time, and our measurement: not clearly better than the mean.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeRemainingColumn

    from rl_plugins.commands.fuse.plan import FusionPlan
    from rl_plugins.commands.fuse.tables import print_plan, print_told
    from rl_plugins.commands.fuse.write import write
    from rl_plugins.runtime.bars import Bars
    from rl_plugins.tools.fusion import FusionRule

    rule = FusionRule(normalize, keep, select_topk, erase, weights.value, seed)
    console, plan = Console(), FusionPlan.of(base, experts, out, rule)
    print_plan(console, plan)
    if dry_run:
        print("Nothing was written (--dry-run).")
        return
    bar = Bars(TextColumn("fusing"), BarColumn(), DownloadColumn(), TimeRemainingColumn(), console=console)
    with bar:
        task = bar.add_task("fusing", total=plan.writes)
        told, differing = write(plan, lambda done: bar.advance(task, done))
    print_told(console, plan, told, differing)
