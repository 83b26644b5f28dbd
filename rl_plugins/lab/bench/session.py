"""Trains what a question needs, from policies that are warm-started here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from rl_plugins.cards.claims import numbers
from rl_plugins.lab.bench.combine import CONFIRM, MOST, SEARCH, TUNED, confirmed, grow, tuned
from rl_plugins.lab.bench.results import Results
from rl_plugins.lab.bench.runs import Waiting, run_missing
from rl_plugins.lab.bench.tables import SECONDS
from rl_plugins.lab.bench.tasks import task_of
from rl_plugins.runtime.bars import Bars, when_begun


def train(wanted: Sequence[Waiting], out: Path, jobs: int, console: Console) -> Results:
    """Runs what is missing."""
    policies = policies_of({task_of(w.task).environment for w in wanted}, console)
    return run_missing(wanted, out, jobs, policies.__getitem__, console)


def stack(
    console: Console,
    candidates: Sequence[str],
    tasks: Sequence[str],
    out: Path,
    jobs: int,
    dry_run: bool,
) -> None:
    """Searches for the best stack of the methods in each task, and confirms it on other seeds."""
    most = len(TUNED) + 1 + sum(len(candidates) - i for i in range(min(MOST, len(candidates))))
    runs = len(tasks) * (most * len(SEARCH) + 3 * len(CONFIRM))
    if dry_run:
        console.print(f"At most {runs} runs, about {runs * SECONDS / jobs / 60:.0f} minutes with {jobs} at a time.")
        return
    policies = policies_of({task_of(name).environment for name in tasks}, console)

    def run(wanted: Sequence[Waiting]) -> Results:
        return run_missing(wanted, out, jobs, policies.__getitem__, console)

    for task in tasks:
        found = "+".join(grow(task, candidates, run))
        if not found:
            console.print(f"{task}: none of {', '.join(candidates)} is ahead of GRPO.", highlight=False)
            continue
        variants = dict.fromkeys((found, "grpo", tuned(Results.read(out), task)))
        results = run([Waiting(task, variant, seed) for seed in CONFIRM for variant in variants])
        told = confirmed(results, task, found)
        console.print(
            f"{task}: {found}, against GRPO {numbers(told['grpo'])}, against {told['tuned']['than']} "
            f"{numbers(told['tuned'])}",
            highlight=False,
        )


def policies_of(environments: Iterable[str], console: Console) -> dict[str, Path]:
    """Environment -> its warm-started policy; "" is the tasks without one."""
    from rl_plugins.lab.bench.policy import load_policy
    from rl_plugins.lab.demo.environments.policy import load_agent_policy

    found = {}
    with Bars(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        for name in sorted(environments):
            told = when_begun(progress, f"warm start of the policy{f' for {name}' if name else ''} (once)")
            found[name] = load_agent_policy(name, progress=told) if name else load_policy(progress=told)
    return found
