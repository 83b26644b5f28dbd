"""What `rl-plugins bench` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from rl_plugins.cards.claims import PaperClaim, measured, name_of, numbers, verdict_text
from rl_plugins.lab.bench.claims import claims, outcome
from rl_plugins.lab.bench.combine import brought, end
from rl_plugins.lab.bench.differences import difference
from rl_plugins.lab.bench.results import Results
from rl_plugins.lab.bench.runs import Waiting
from rl_plugins.lab.bench.tasks import COST_UNITS, TASKS
from rl_plugins.lab.bench.verl_runs import agreement

SECONDS = 48.0  # of a run on a core that has nothing else to do
IN_VERL = 240.0  # of the one run that was made in verl, beside other work on two cores


def print_overview(console: Console, results: Results) -> None:
    """The tasks, and how many claims there are."""
    table = Table("task", "what is different", "GRPO's runs here", title="Tasks of the bench")
    for name, task in TASKS.items():
        table.add_row(name, task.about, str(len(results.seeds(name, "grpo"))))
    console.print(table)
    asked = claims()
    tested = sum(bool(c.task) for c in asked)
    console.print(
        f"{len(asked)} claims of papers, {tested} of which a task can test. Name methods to run theirs, for example "
        f"`rl-plugins bench mc_grpo`, or --all. --dry-run prints what would run.",
        highlight=False,
    )


def print_plan(console: Console, wanted: Sequence[Waiting], results: Results, jobs: int, seconds: float) -> None:
    """What would run, and for how long."""
    missing = [w for w in dict.fromkeys(wanted) if not results.has(w.task, w.variant, w.seed)]
    table = Table("task", "variant", "seeds", "missing", title="Runs")
    for task, variant in dict.fromkeys((w.task, w.variant) for w in wanted):
        of = [w for w in dict.fromkeys(wanted) if (w.task, w.variant) == (task, variant)]
        table.add_row(task, variant, str(len(of)), str(sum(w in missing for w in of)))
    console.print(table)
    minutes = len(missing) * seconds / jobs / 60
    console.print(f"{len(missing)} runs, about {minutes:.0f} minutes with {jobs} at a time.", highlight=False)


def print_report(
    console: Console,
    results: Results,
    variants: Sequence[str],
    wanted: Sequence[Waiting],
    asked: Sequence[PaperClaim],
) -> None:
    """Differences from GRPO, and what became of the claims."""
    equal = [f"difference at equal {c.replace('_', ' ')}" for c in COST_UNITS]
    table = Table("task", "variant", "variant / GRPO", *equal, "seeds")
    for task in dict.fromkeys(w.task for w in wanted):
        for variant in variants:
            of = [difference(results, task, variant, "grpo", TASKS[task].metric, budget=c) for c in COST_UNITS]
            if first := of[0]:
                told = [numbers(asdict(d)) if d else "" for d in of]
                table.add_row(task, variant, f"{first.value:.3f} / {first.other:.3f}", *told, str(first.seeds))
    console.print(table)
    if asked:
        became = Table("claim", "task", "difference", "seeds", "verdict", title="Claims")
        for claim in asked:
            told_of = outcome(results, claim)
            found = "; ".join(f"{numbers(d)} to {name_of(told_of, k)}" for k, d in measured(told_of).items())
            seeds = str(told_of.get("seeds", ""))
            became.add_row(f"{claim.label}: {claim.says}", claim.task, found, seeds, verdict_text(told_of))
        console.print(became)


def print_brought(console: Console, results: Results, tasks: Sequence[str], methods: Sequence[str]) -> None:
    """Shapley values of methods that were run in all subsets."""
    table = Table("task", "seeds", *methods, "all together", title="What each method brought (Shapley values)")
    for task in tasks:
        if found := brought(results, task, methods):
            values = [f"{v['value']:+.3f} ({v['low']:+.3f} to {v['high']:+.3f})" for v in found["methods"].values()]
            table.add_row(task, str(found["seeds"]), *values, f"{found['total']:+.3f}")
    console.print(table)


def print_agreement(console: Console, mine: Results, other: Results) -> None:
    """Whether a rerun agrees with other raw results: mean of the metric of the task, by Welch's t."""
    from scipy import stats

    table = Table("task", "variant", "here", "there", "", title="Against other results")
    for task, variant in dict.fromkeys((c, a) for c, a, _ in mine.runs):
        pairs = [[end(of, task, variant, seed) for seed in of.seeds(task, variant)] for of in (mine, other)]
        if min(map(len, pairs)) < 2:
            continue
        same = pairs[0] == pairs[1][: len(pairs[0])]
        agrees = same or stats.ttest_ind(*pairs, equal_var=False).pvalue > 0.05
        word = "the same" if same else "agrees" if agrees else "DIFFERS"
        table.add_row(task, variant, *(f"{sum(p) / len(p):.3f} ({len(p)} seeds)" for p in pairs), word)
    console.print(table)


def print_both_hosts(console: Console, verl: Results, trl: Results) -> None:
    """Differences from GRPO in both hosts."""
    table = Table(
        "task", "variant", "TRL", "verl", "seeds", "verl - TRL", "", title="Difference from GRPO in both hosts"
    )
    for t in agreement(trl, verl):
        apart = f"{-t['high']:+.3f} to {-t['low']:+.3f}"
        seeds = " and ".join(map(str, t["seeds"]))
        word = "agree" if t["agree"] else "DIFFER"
        table.add_row(t["task"], t["variant"], f"{t['trl']:+.3f}", f"{t['verl']:+.3f}", seeds, apart, word)
    console.print(table)
    if not table.row_count:
        console.print("Nothing to compare yet: it takes two seeds of a variant and of GRPO in both hosts.")
