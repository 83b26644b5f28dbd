"""`rl-plugins bench`: what a method does on generated tasks under equal budgets, and what becomes of the claims of its
paper."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from rl_plugins.commands.shared.options import DryRun, HostName, TrainedIn
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.files import claim


def bench(
    methods: Annotated[
        list[str] | None,
        typer.Argument(metavar="[METHOD...]", help="Variants: `vade`, `vade+minpro`.", show_default=False),
    ] = None,
    task: Annotated[list[str] | None, typer.Option(help="Task; may be repeated.")] = None,
    host: TrainedIn = HostName.trl,
    setting: Annotated[str, typer.Option(help="All tasks with another value of a setting, e.g. noise.")] = "",
    every: Annotated[bool, typer.Option("--all", help="Run every method that has a claim.")] = False,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds of every variant. A verdict takes 8 or more.")] = 8,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time, each with one core.")] = 2,
    attribute: Annotated[
        bool, typer.Option("--attribute", help="Run every subset of the methods, and print what each one brought.")
    ] = False,
    stack: Annotated[
        bool, typer.Option("--stack", help="Search for the best stack of the methods, and confirm it on other seeds.")
    ] = False,
    quality: Annotated[
        bool,
        typer.Option("--quality", help="Measure gradients in small exact worlds, which are the tasks."),
    ] = False,
    out: Annotated[Path, typer.Option(help="Folder of the runs and the raw results.")] = Path("bench-results"),
    against: Annotated[Path | None, typer.Option(help="Folder of other raw results to compare with.")] = None,
    publish: Annotated[Path | None, typer.Option(help="Checkout that keeps the results.", hidden=True)] = None,
    dry_run: DryRun = False,
) -> None:
    """Compare methods on generated tasks, and decide the claims of their papers.

    Every variant of a task has the same small policy, prompts, seeds and budget. A run takes most of a minute of a
    core. What was finished is kept: the same command goes on.

    \b
    What there is:
      rl-plugins bench

    \b
    The claims of a method with their controls, and its neutral task:
      rl-plugins bench vade

    \b
    Two methods and both together over the values of a setting, with four seeds:
      rl-plugins bench vade gdpo vade+gdpo --setting noise --seeds 4

    \b
    What each of three methods brings, and the best stack of them:
      rl-plugins bench vade gdpo minpro --task staleness=3 --attribute
      rl-plugins bench vade gdpo minpro --task staleness=3 --stack

    \b
    Whether verl agrees, after the same variants were run in TRL (minutes per run):
      rl-plugins bench vade --task neutral --host verl --seeds 3

    \b
    How good the gradients of two methods are, beside GRPO's, in seconds (docs/quality.md):
      rl-plugins bench vade gdpo --quality --task skills --task rewards --seeds 2
    """
    from rich.console import Console

    from rl_plugins.lab.bench import session, tables
    from rl_plugins.lab.bench.choice import wanted, with_setting
    from rl_plugins.lab.bench.claims import claims, claims_of
    from rl_plugins.lab.bench.combine import subsets
    from rl_plugins.lab.bench.figures import draw_method
    from rl_plugins.lab.bench.results import Results
    from rl_plugins.lab.bench.verl_runs import run_verl
    from rl_plugins.lab.compare.comparison import need_plots

    console, methods, verl = Console(), methods or [], host == HostName.verl
    if quality:
        from rl_plugins.lab.quality.session import session as measure

        measure(console, methods, task or [], seeds, jobs, out, publish, dry_run)
        return
    tasks = [*(task or []), *with_setting(setting)]
    if not (methods or every or tasks):
        tables.print_overview(console, Results.read(out))
        _publish(out, publish)
        return
    if verl and (not tasks or attribute or stack):
        raise ConfigError(
            "--host verl checks that both hosts agree. Name tasks (--task), without --attribute and --stack."
        )
    if attribute or stack:
        _need_together(methods, tasks)
    if stack:
        if not dry_run:
            claim(out, "bench")
        session.stack(console, methods, tasks, out, jobs, dry_run)
        _publish(out, None if dry_run else publish)
        return
    together = subsets(methods)[1:] if attribute else methods
    names = list(dict.fromkeys([*together, *(c.method for c in claims() if every and c.task)]))
    asked = [c for name in names for c in claims_of(name) if c.task and (not tasks or c.task in tasks)]
    runs = wanted(names, tasks, asked, range(seeds))
    if dry_run:
        folder, at_a_time, seconds = (out / "verl", 1, tables.IN_VERL) if verl else (out, jobs, tables.SECONDS)
        tables.print_plan(console, runs, Results.read(folder), at_a_time, seconds)
        return
    need_plots()
    claim(out, "bench")
    if verl:
        policy = session.policies_of([""], console)[""]
        tables.print_both_hosts(console, run_verl(runs, out / "verl", policy), Results.read(out))
        return
    results = session.train(runs, out, jobs, console)
    variants = [variant for variant in dict.fromkeys(run.variant for run in runs) if variant != "grpo"]
    tables.print_report(console, results, variants, runs, asked)
    for variant in variants:
        draw_method(results, variant, out / "curves" / f"{variant.replace('/', '_')}.png")
    console.print(f"Raw results: {out}/runs.parquet, curves.parquet. Figures: {out / 'curves'}", highlight=False)
    if attribute:
        tables.print_brought(console, results, tasks, methods)
    if against:
        tables.print_agreement(console, results, Results.read(against))
    _publish(out, publish)


def _need_together(methods: Sequence[str], tasks: Sequence[str]) -> None:
    """What is said of methods together needs some, and a task to say it of."""
    if len(methods) < 2 or any("+" in m or "@" in m for m in methods):
        raise ConfigError(
            f"{len(methods)} methods are named. --attribute and --stack need two or more, without + and @."
        )
    if not tasks:
        raise ConfigError("No task is named. --attribute and --stack need --task or --setting.")


def _publish(out: Path, checkout: Path | None) -> None:
    if checkout is not None:
        from rl_plugins.lab.bench.publish import publish

        publish(out, checkout)
