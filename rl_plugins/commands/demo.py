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
        list[str] | None, typer.Argument(help="Methods; `vade+minpro` is one variant with both.")
    ] = None,
    host: TrainedIn = HostName.trl,
    vs: Baseline = "grpo",
    seeds: Annotated[
        str | None,
        typer.Option(
            help="Number of seeds (3), or the seeds (4,7,11).", show_default="3; with --host verl: 2; with --real: 1"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the results.", show_default="demo-results, demo-results-verl or demo-results-real"
        ),
    ] = None,
    jobs: Jobs = None,
    long: Annotated[bool, typer.Option("--long", help="Run more steps.")] = False,
    budget: Budget = CostUnit.steps,
    real: Annotated[
        bool, typer.Option("--real", help="Train a pre-trained language model of 135 M parameters with LoRA instead.")
    ] = False,
    dry_run: DryRun = False,
) -> None:
    """Train methods and plain GRPO side by side on a small policy built here.

    Without METHODS it trains on two rewards of different size: plain GRPO, GDPO, and a control. With --host verl it
    trains vade. With --real it trains gdpo and plain GRPO, with one seed.

    Policies are made once and kept in the user's cache folder rl-plugins, or in that of the environment variable
    RL_PLUGINS_CACHE.
    """
    from rl_plugins.lab.compare.comparison import RunOptions
    from rl_plugins.lab.demo.demos import demo_trl, demo_verl, headline

    if real:
        if host == HostName.verl:
            raise ConfigError("--real is given with --host verl. It trains in TRL: leave one of them out.")
        from rl_plugins.lab.real.demo import demo_real

        folder = out or Path("demo-results-real")
        demo_real(
            methods or ["gdpo"], RunOptions(folder, parse_seeds(seeds or "1"), vs, jobs or 2, budget, dry_run), long
        )
        return
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
