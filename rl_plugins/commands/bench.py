"""`rl-plugins bench`: what a method does on generated tasks under equal budgets, and what becomes of the claims of
its paper."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from rl_plugins.commands.compare import need_plots
from rl_plugins.core.errors import ConfigError
from rl_plugins.lab.bench import search as learning_rates
from rl_plugins.lab.bench.claims import LOOKS, PaperClaim, claims, claims_of
from rl_plugins.lab.bench.combine import CONFIRM, MOST, SEARCH, TUNED, brought, confirmed, end, grow, subsets, tuned
from rl_plugins.lab.bench.differences import difference
from rl_plugins.lab.bench.published import numbers
from rl_plugins.lab.bench.results import Results, is_current
from rl_plugins.lab.bench.runs import Waiting, run_missing
from rl_plugins.lab.bench.tasks import COST_UNITS, TASKS, task_of
from rl_plugins.lab.bench.variants import BenchVariant
from rl_plugins.lab.bench.verdicts import ClaimResult, decide, matrix
from rl_plugins.lab.bench.verl_runs import agreement, run_verl

SECONDS = 25.0  # of a run on a core that has nothing else to do
IN_VERL = 240.0  # of the one run that was made in verl, beside other work on two cores
RAW = "benchmarks/bench"


def bench(
    methods: Sequence[str],
    tasks: Sequence[str],
    setting: str,
    every: bool,
    seeds: int,
    until_decided: bool,
    jobs: int,
    out: Path,
    attribute: bool,
    stack: bool,
    against: Path | None,
    publish: Path | None,
    dry_run: bool,
    host: str = "trl",
    search: bool = False,
) -> None:
    """Trains what is missing and prints differences and verdicts.

    Args:
        methods: variants, such as `mc_grpo` or `vade+mc_grpo`.
        tasks: names; none: those of the claims, and `neutral`.
        setting: all tasks with another value of it.
        every: all methods that have a claim, on the tasks of their claims and on `neutral`.
        seeds: at first.
        until_decided: more seeds for claims that are undecided, at most `LOOKS[-1]`.
        attribute: run all subsets of the methods, and say what each one brought.
        stack: search for the best stack of the methods in each task, and confirm it on fresh seeds.
        against: folder of raw results to compare with.
        publish: checkout in which the raw results, the summary and the figures are kept.
        search: search the learning rate of the variant that lost, where a claim is decided, and decide again.
        host: "verl" trains the variants in verl, one after another, and compares with the results of TRL in `out`.

    Raises:
        ConfigError: an unknown method, task or setting, or with verl no task, or one that verl does not train.
    """
    console = Console()
    chosen = [*tasks, *(name for name, task in TASKS.items() if setting and task.setting == setting)]
    if setting and len(chosen) == len(tasks):
        raise ConfigError(
            f"There is no setting {setting!r}. Settings: {', '.join(dict.fromkeys(c.setting for c in TASKS.values()))}."
        )
    if not (methods or every or chosen):
        _overview(console, Results.read(out))
        if publish:
            _publish(out, publish)
        return
    if host == "verl" and (not chosen or attribute or stack or until_decided or search):
        raise ConfigError(
            "--host verl checks that both hosts agree. Name tasks (--task), without --attribute, --stack, "
            "--until-decided and --search."
        )
    if attribute or stack:
        _need_together(methods, chosen)
    if stack:
        _stack(console, methods, chosen, out, jobs, publish, dry_run)
        return
    together = subsets(methods)[1:] if attribute else list(methods)
    names = list(dict.fromkeys([*together, *(c.method for c in claims() if every and c.task)]))
    asked = [c for name in names for c in claims_of(name) if c.task and (not chosen or c.task in chosen)]
    wanted = _wanted(names, chosen, asked, range(seeds))
    if dry_run:
        verl = host == "verl"
        _plan(
            console, wanted, Results.read(out / "verl" if verl else out), *((1, IN_VERL) if verl else (jobs, SECONDS))
        )
        return
    need_plots()
    policies = _policies({task_of(w.task).environment for w in wanted}, console)
    if host == "verl":
        _both_hosts(console, run_verl(wanted, out / "verl", policies[""]), Results.read(out))
        return
    results = run_missing(wanted, out, jobs, policies.__getitem__, console)
    while until_decided and (more := _undecided(results, asked)):
        results = run_missing(more, out, jobs, policies.__getitem__, console)
    while search and (more := _searched(results, asked)):
        results = run_missing(more, out, jobs, policies.__getitem__, console)
    variants = [variant for variant in dict.fromkeys(w.variant for w in wanted) if variant != "grpo"]
    _report(console, results, variants, wanted, asked)
    _draw(console, results, variants, out)
    if attribute:
        _brought(console, results, chosen, methods)
    if against:
        _agreement(console, results, Results.read(against))
    if publish:
        _publish(out, publish)


def _need_together(methods: Sequence[str], tasks: Sequence[str]) -> None:
    """What is said of methods together needs some, and a task to say it of."""
    if len(methods) < 2 or any("+" in m or "@" in m for m in methods):
        raise ConfigError(
            f"{len(methods)} methods are named. --attribute and --stack need two or more, without + and @."
        )
    if not tasks:
        raise ConfigError("No task is named. --attribute and --stack need --task or --setting.")


def _stack(
    console: Console,
    candidates: Sequence[str],
    tasks: Sequence[str],
    out: Path,
    jobs: int,
    publish: Path | None,
    dry_run: bool,
) -> None:
    most = len(TUNED) + 1 + sum(len(candidates) - i for i in range(min(MOST, len(candidates))))
    runs = len(tasks) * (most * len(SEARCH) + 3 * len(CONFIRM))
    if dry_run:
        console.print(f"At most {runs} runs, about {runs * SECONDS / jobs / 60:.0f} minutes with {jobs} at a time.")
        return
    policies = _policies({task_of(name).environment for name in tasks}, console)

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
    if publish:
        _publish(out, publish)


def _brought(console: Console, results: Results, tasks: Sequence[str], methods: Sequence[str]) -> None:
    table = Table("task", "seeds", *methods, "all together", title="What each method brought (Shapley values)")
    for task in tasks:
        if found := brought(results, task, methods):
            values = [f"{v['value']:+.3f} ({v['low']:+.3f} to {v['high']:+.3f})" for v in found["methods"].values()]
            table.add_row(task, str(found["seeds"]), *values, f"{found['total']:+.3f}")
    console.print(table)


def _wanted(
    variants: Iterable[str], tasks: Sequence[str], asked: Sequence[PaperClaim], seeds: Iterable[int]
) -> list[Waiting]:
    """Task by task, the baseline first, so that what was done is whole whenever it ends. `neutral` comes last."""
    pairs: dict[str, dict[str, None]] = {}
    for task in tasks:
        task_of(task)
        pairs.setdefault(task, {"grpo": None}).update(dict.fromkeys(variants))
    for claim in asked:
        pairs.setdefault(claim.task, {"grpo": None}).update({claim.than: None, claim.label: None})
    neutral = {} if tasks else {"neutral": {"grpo": None, **dict.fromkeys(_plain(variants, asked))}}
    order = list(TASKS)
    found = [*sorted(pairs.items(), key=lambda pair: order.index(pair[0])), *neutral.items()]
    seeds = list(seeds)
    for name, of in found:
        for variant in of:
            BenchVariant.of(variant).check(task_of(name))
    wanted = [Waiting(task, variant, seed) for task, of in found for seed in seeds for variant in of]
    return list(dict.fromkeys(wanted))


def _plain(variants: Iterable[str], asked: Sequence[PaperClaim]) -> list[str]:
    """Variants for `neutral`: as in the claims of a method, if they are no agents and the host's options stay."""
    found = []
    for variant in variants:
        of = [c for c in asked if c.method == variant]
        labels = {c.label for c in of if not TASKS[c.task].environment and "@" not in c.label}
        found += sorted(labels) if of else [variant]
    return found


def _undecided(results: Results, asked: Sequence[PaperClaim]) -> list[Waiting]:
    more = []
    for decided in decide(results, asked):
        if decided.verdict == "undecided" and decided.found and decided.found.seeds < LOOKS[-1]:
            c = decided.claim
            upto = next(n for n in LOOKS if n > decided.found.seeds)
            more += [Waiting(c.task, variant, seed) for seed in range(upto) for variant in (c.than, c.label)]
    return [w for w in more if not results.has(w.task, w.variant, w.seed)]


def _searched(results: Results, asked: Sequence[PaperClaim]) -> list[Waiting]:
    """Of every decided claim: the search of the variant that lost, then that variant on the seeds of the claim."""
    more = [
        w
        for decided in decide(results, asked)
        if decided.lost and decided.found
        for w in learning_rates.missing(results, decided.claim, decided.lost, range(decided.found.seeds))
    ]
    return list(dict.fromkeys(more))


def _policies(environments: Iterable[str], console: Console) -> dict[str, Path]:
    from rl_plugins.lab.bench.policy import load_policy
    from rl_plugins.lab.demo.environments.policy import load_agent_policy

    found = {}
    with Progress(TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), console=console) as progress:
        for name in sorted(environments):
            task = progress.add_task(f"warm start of the policy{f' for {name}' if name else ''} (once)", total=None)

            def told(step: int, total: int, _: float, task: Any = task) -> None:
                progress.update(task, total=total, completed=step)

            found[name] = load_agent_policy(name, progress=told) if name else load_policy(progress=told)
            progress.update(task, total=1, completed=1)
    return found


# ---- what is printed


def _overview(console: Console, results: Results) -> None:
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


def _plan(console: Console, wanted: Sequence[Waiting], results: Results, jobs: int, seconds: float) -> None:
    missing = [w for w in dict.fromkeys(wanted) if not results.has(w.task, w.variant, w.seed)]
    table = Table("task", "variant", "seeds", "missing", title="Runs")
    for task, variant in dict.fromkeys((w.task, w.variant) for w in wanted):
        of = [w for w in dict.fromkeys(wanted) if (w.task, w.variant) == (task, variant)]
        table.add_row(task, variant, str(len(of)), str(sum(w in missing for w in of)))
    console.print(table)
    minutes = len(missing) * seconds / jobs / 60
    console.print(f"{len(missing)} runs, about {minutes:.0f} minutes with {jobs} at a time.", highlight=False)


def _report(
    console: Console,
    results: Results,
    variants: Sequence[str],
    wanted: Sequence[Waiting],
    asked: Sequence[PaperClaim],
) -> None:
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


def _draw(console: Console, results: Results, variants: Sequence[str], out: Path) -> None:
    """Curves of every variant beside GRPO's."""
    from rl_plugins.lab.bench.figures import draw_method

    for variant in variants:
        draw_method(results, variant, out / "curves" / f"{variant.replace('/', '_')}.png")
    console.print(f"Raw results: {out}/runs.parquet, curves.parquet. Figures: {out / 'curves'}", highlight=False)


def _told(decided: ClaimResult) -> tuple[str, ...]:
    c, found = decided.claim, decided.found
    tuned = f", with {decided.tuned} {decided.again.text}" if decided.again else ""
    return (
        f"{c.label}: {c.says}",
        c.task,
        f"{found.text} {c.metric}{tuned}" if found else decided.error,
        str(found.seeds) if found else "",
        decided.verdict,
    )


def _agreement(console: Console, mine: Results, other: Results) -> None:
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


def _both_hosts(console: Console, verl: Results, trl: Results) -> None:
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


def _publish(out: Path, root: Path) -> None:
    """Keeps raw results, summary and figures in a checkout. Runs with old settings are left out."""
    from rl_plugins.lab.bench import figures, summary

    if not (root / "rl_plugins" / "bench").is_dir():
        raise ConfigError(f"{root} is no checkout of rl-plugins. Name the folder of one with --publish.")
    kept, in_verl = _kept(out, root / RAW), _kept(out / "verl", root / RAW / "verl")
    told = summary.summary(kept, in_verl)
    (root / "rl_plugins" / "bench" / "ours.json").write_text(json.dumps(told, indent=1) + "\n")
    folder = root / "docs" / "figures" / "bench"
    shutil.rmtree(folder, ignore_errors=True)
    figures.draw(kept, told, folder)


def _kept(out: Path, raw: Path) -> Results:
    """The raw results of a checkout with those of a folder, written and returned."""
    kept = Results.read(raw)
    for run in Results.read(out).runs.values():
        kept.add(run)
    kept = Results(run for run in kept.runs.values() if is_current(run))
    if kept.runs:
        kept.write(raw)
    return kept
