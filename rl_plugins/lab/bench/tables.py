"""What `rl-plugins bench` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table

from rl_plugins.cards.claims import PaperClaim
from rl_plugins.lab.bench.claims import claims
from rl_plugins.lab.bench.combine import brought, end
from rl_plugins.lab.bench.differences import difference
from rl_plugins.lab.bench.results import Results
from rl_plugins.lab.bench.runs import Waiting
from rl_plugins.lab.bench.tasks import COST_UNITS, TASKS
from rl_plugins.lab.bench.verdicts import ClaimResult, decide, matrix
from rl_plugins.lab.bench.verl_runs import agreement

SECONDS = 25.0  # of a run on a core that has nothing else to do
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
    tasks = list(dict.fromkeys(w.task for w in wanted))
    table = Table(
        "task",
        "variant",
        "variant / GRPO",
        *(f"difference at equal {c.replace('_', ' ')}" for c in COST_UNITS),
        "seeds",
    )
    places = matrix(results, variants)
    for task in tasks:
        for variant in variants:
            place = places.get((variant, task))
            if place is None or place.found is None:
                continue
            of = [difference(results, task, variant, "grpo", TASKS[task].metric, budget=c) for c in COST_UNITS]
            table.add_row(
                task,
                variant,
                f"{place.found.value:.3f} / {place.found.other:.3f}",
                *(d.text if d else "" for d in of),
                f"{place.found.seeds}, {place.mark}",
            )
    console.print(table)
    if asked:
        told = Table("claim", "task", "difference", "seeds", "verdict", title="Claims")
        for decided in decide(results, asked):
            told.add_row(*_told(decided))
        console.print(told)


def _told(decided: ClaimResult) -> tuple[str, ...]:
    c, found = decided.claim, decided.found
    tuned = f", with {decided.tuned} {decided.again.found.text}" if decided.again else ""
    return (
        f"{c.label}: {c.says}",
        c.task,
        f"{found.text} {c.metric}{tuned}" if found else decided.error,
        str(found.seeds) if found else "",
        decided.verdict,
    )


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
