"""`rl-plugins compare`: methods and a baseline on the user's own run."""

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
    MethodParams,
    TrainedIn,
    one_job,
    parse_seeds,
)
from rl_plugins.core.errors import ConfigError


def compare(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="CONFIG METHOD... | METHOD... -- OVERRIDES...",
            help="Methods (`vade+minpro` is one variant with both) and your run.",
            show_default=False,
        ),
    ],
    host: TrainedIn = HostName.trl,
    vs: Baseline = "grpo",
    seeds: Annotated[str, typer.Option(help="Number of seeds (3), or the seeds (4,7,11).")] = "3",
    out: Annotated[Path, typer.Option(help="Folder of the results.")] = Path("compare-results"),
    jobs: Jobs = None,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            help="Logged value to compare; may be repeated. The report shows only these, and replaces the last."
        ),
    ] = None,
    launcher: Annotated[str, typer.Option(help='Launcher of TRL, e.g. "accelerate launch --num_processes 4".')] = "",
    method_params: MethodParams = None,
    budget: Budget = CostUnit.steps,
    attribute: Annotated[
        bool, typer.Option("--attribute", help="Train every subset of the methods, and print what each one brought.")
    ] = False,
    attribute_pairs: Annotated[
        int | None,
        typer.Option("--attribute-pairs", help="Train only the subsets along this many pairs of random orders."),
    ] = None,
    dry_run: DryRun = False,
) -> None:
    """Compare methods with a baseline on your own run, under one budget, with intervals.

    \b
    The methods given here take the place of those of the run, whose other values stay, parameters of methods included.

    A run of TRL, by its config; further options go to `trl grpo`:
      rl-plugins compare run.yaml vade minpro --learning_rate 1e-6

    \b
    A run of verl, by its overrides or by the whole command:
      rl-plugins compare --host verl vade minpro -- data.train_batch_size=64 trainer.test_freq=20 ...
    """
    from rl_plugins.lab.compare.comparison import RunOptions
    from rl_plugins.lab.compare.user_runs import compare_trl, compare_verl

    options = RunOptions(out, parse_seeds(seeds), vs, jobs or 1, budget, dry_run)
    of_methods = (metric or [], method_params, attribute, attribute_pairs)
    if host == HostName.trl:
        compare_trl(words, options, *of_methods, launcher)
        return
    one_job(jobs)
    if launcher:
        raise ConfigError("--launcher is for TRL; verl starts its own processes. Leave it out.")
    compare_verl(words, options, *of_methods)
