"""`rl-plugins demo`: methods and plain GRPO on a small policy that is built here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rl_plugins.commands.shared.options import (
    Baseline,
    Budget,
    CostUnit,
    DryRun,
    HostName,
    Jobs,
    TrainedIn,
    one_job,
    parse_seeds,
)
from rl_plugins.core.errors import ConfigError


def demo(
    methods: Annotated[
        list[str] | None, typer.Argument(help="Methods; `vade+mc_grpo` is one variant with both.")
    ] = None,
    host: TrainedIn = HostName.trl,
    vs: Baseline = "grpo",
    seeds: Annotated[
        str | None,
        typer.Option(help="Number of seeds (3), or the seeds (4,7,11).", show_default="3; with --host verl: 2"),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder of the results.", show_default="demo-results, or demo-results-verl"),
    ] = None,
    jobs: Jobs = None,
    long: Annotated[bool, typer.Option("--long", help="Run more steps.")] = False,
    budget: Budget = CostUnit.steps,
    dry_run: DryRun = False,
) -> None:
    """Train methods and plain GRPO side by side on a small policy built here.

    Without METHODS it trains on two rewards of different size: plain GRPO, GDPO, and a control. With --host verl it
    trains vade.
    """
    from rl_plugins.lab.compare.comparison import RunOptions
    from rl_plugins.lab.demo.demos import demo_trl, demo_verl, headline

    if host == HostName.verl:
        one_job(jobs)
        folder = out or Path("demo-results-verl")
        options = RunOptions(folder, parse_seeds(seeds or "2"), vs, 1, budget, dry_run)
        demo_verl(methods or ["vade"], options, long)
        return
    options = RunOptions(out or Path("demo-results"), parse_seeds(seeds or "3"), vs, jobs or 2, budget, dry_run)
    if methods:
        demo_trl(methods, options, long)
        return
    if vs != "grpo":
        raise ConfigError(f"--vs {vs} is given without a method. Name one: rl-plugins demo gdpo --vs {vs}")
    headline(options, long)
