"""`rl-plugins probe`: which method makes the best gradient on the user's own task, before anything is trained."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_plugins.commands.shared.options import DryRun
from rl_plugins.core.errors import ConfigError


def probe(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]",
            help="YAML config of `trl grpo`, options of it may follow; or the command line of a run of verl.",
            show_default=False,
        ),
    ] = None,
    methods: Annotated[
        list[str] | None, typer.Option(help="Method to compare; may be repeated.", show_default="all")
    ] = None,
    prompts: Annotated[int, typer.Option(min=1, help="Prompts of the pool, a random sample of the dataset.")] = 128,
    rollouts: Annotated[int, typer.Option(min=2, help="Rollouts of each prompt.")] = 32,
    batch: Annotated[int | None, typer.Option(min=1, help="Rollouts of a batch.", show_default="the run's")] = None,
    k: Annotated[int, typer.Option("--k", min=2, help="Tries of pass@k.")] = 8,
    solved_by: Annotated[
        str, typer.Option(help="Reward function that says what is solved.", show_default="weighted sum")
    ] = "",
    threshold: Annotated[float, typer.Option(help="Lowest reward that counts as solved.")] = 0.5,
    accuracy: Annotated[float, typer.Option(min=0.005, max=0.5, help="Deviation of cosines of sketches.")] = 0.03,
    rows: Annotated[int, typer.Option(min=1, help="Rollouts of a backward pass: memory against time.")] = 16,
    seed: Annotated[int, typer.Option(help="Seed of prompts, rollouts and methods.")] = 0,
    out: Annotated[Path, typer.Option(help="Folder of the pool; a run that was cut off goes on there.")] = Path(
        "probe"
    ),
    checkpoints: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of a later model or adapter; may be repeated.", show_default=False),
    ] = None,
    trace: Annotated[
        Path | None, typer.Option(help="Run with a trace: what its rewards and groups say without gradients.")
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="Newest batches of the trace.", show_default="all")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    dry_run: DryRun = False,
) -> None:
    """Which method helps on my task? Compare the gradients they would make, before training.

    Rollouts of your model on your prompts are drawn and rewarded once, and the gradient of each is kept as a sketch.
    Then every method that your run can use decides about them through its real class. Progress is the best expected
    gain of one step; no learning rate is involved. Each fold of the prompts is judged by the gradients of the others,
    and intervals are over folds. docs/probe.md explains the figures.

    \b
    What it would cost, and what it would compare:
      rl-plugins probe run.yaml --dry-run

    \b
    The answer, with the reward function that says what is solved:
      rl-plugins probe run.yaml --solved-by correct

    \b
    Three methods in larger batches; the pool that is there is used again:
      rl-plugins probe run.yaml --methods vade --methods gdpo --methods v0_5 --batch 1024

    \b
    How far the first policy speaks for later ones of the run:
      rl-plugins probe run.yaml --checkpoints out/checkpoint-100 --checkpoints out/checkpoint-200

    \b
    A run of verl: its data, rewards and settings; transformers draws the rollouts:
      rl-plugins probe -- python -m verl.trainer.main_ppo data.train_files=train.parquet ...

    \b
    A run with `trace: true`, of TRL or verl, in seconds: groups with signal, variance of advantages:
      rl-plugins probe --trace out
    """
    from rich.console import Console

    console = Console()
    if trace is not None:
        if words:
            raise ConfigError(f"--trace {trace} and a config are given. Give one of them.")
        from rl_plugins.lab.probe.trace import probe_trace

        probe_trace(console, trace, methods or [], last, as_json)
        return
    from rl_plugins.lab.probe.pool import PoolPlan
    from rl_plugins.lab.probe.session import probe_run

    plan = PoolPlan(prompts, rollouts, accuracy, seed, solved_by, threshold, rows)
    probe_run(console, words or [], methods or [], plan, k, out, batch, checkpoints or [], as_json, dry_run)
