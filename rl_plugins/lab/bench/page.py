"""The results of docs/bench.md on the site, from `published.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from rl_plugins.cards.claims import numbers
from rl_plugins.lab.bench.claims import DECIDED
from rl_plugins.lab.bench.published import COSTS, methods_run, published, tasks_run
from rl_plugins.lab.bench.tasks import METRICS, TASKS

SIGN = {"better": "+", "worse": "−", "no significant difference": "·", "failed": "x"}


def results() -> str:
    """What docs/bench.md shows on the site, after what it says of tasks and verdicts."""
    told = published()
    parts = []
    if told["matrix"]:
        parts += [_matrix(told), _claims(told), _together(told), _hosts(told), _costs(told)]
    parts += [_tasks(), _not_tested(told)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts)


def _matrix(told: Mapping[str, Any]) -> str:
    tasks = tasks_run()
    by = {(p["variant"], p["task"]): p for p in told["matrix"]}
    variants = sorted({p["variant"] for p in told["matrix"]})
    head = (
        f"## Methods by tasks\n\n{told['runs']} runs, {told['hours']:.1f} hours of one core, the last one on "
        f"{told['last']}. Difference from GRPO in the metric of the task at equal steps; **+** better, **−** worse, "
        "**·** no significant difference, x refused to run or failed, for the reason below; an empty place was not "
        "run.\n\n"
        "![Methods by tasks](figures/bench/matrix.png)\n\n"
        "| variant | " + " | ".join(tasks) + " |\n|---|" + "---|" * len(tasks)
    )
    rows = [
        f"| {_linked(variant, told)} | " + " | ".join(_place(by.get((variant, task))) for task in tasks) + " |"
        for variant in variants
    ]
    refused = [f"- `{p['variant']}` in {p['task']}: {p['error']}" for p in told["matrix"] if "error" in p]
    return "\n".join([head, *rows, "", *refused, ""])


def _linked(variant: str, told: Mapping[str, Any]) -> str:
    name = variant.partition("@")[0]
    return f"[`{variant}`](bench/{name}.md)" if name in methods_run(told) else f"`{variant}`"


def _place(place: Mapping[str, Any] | None) -> str:
    if place is None:
        return ""
    if "mean" not in place:
        return SIGN[place["mark"]]
    return f"**{SIGN[place['mark']]}** {place['mean']:+.3f} ({place['seeds']})"


def _claims(told: Mapping[str, Any]) -> str:
    run = [c for c in told["claims"] if c["verdict"] in ("confirmed", "refuted", "undecided", "failed")]
    counts = Counter(c["verdict"] for c in told["claims"])
    order = {"confirmed": 0, "refuted": 1, "undecided": 2, "failed": 3}
    lines = [
        "## Claims",
        "",
        ", ".join(f"{n} {verdict}" for verdict, n in counts.most_common()) + ".",
        "",
        "| method | the paper says | " + CLAIM_HEAD,
    ]
    for c in sorted(run, key=lambda c: (order[c["verdict"]], c["method"])):
        lines.append(f"| [`{c['method']}`](bench/{c['method']}.md) | {c['says']} | {claim_row(c)}")
    return "\n".join([*lines, ""])


def headline() -> str:
    """What README says of the bench, with links from the root of the repository."""
    told = published()
    of = {v: [c for c in told["claims"] if c["verdict"] == v] for v in ("confirmed", "refuted", "undecided")}
    run = sum(map(len, of.values()))
    told_apart = "; ".join(
        f"{len(of[v])} {v} ({', '.join(dict.fromkeys(_named(c) for c in of[v]))})" for v in of if of[v] and v in DECIDED
    )
    return (
        f"Methods and baselines ran on the same generated tasks with equal budgets, {told['runs']} runs, against "
        f"claims that were written down first. Of {run} claims that a small policy can test: {told_apart}; "
        f"{len(of['undecided'])} undecided. [The page of the bench](docs/bench.md) has all intervals and curves."
    )


def _named(claim: Mapping[str, Any]) -> str:
    return f"`{claim['method']}`"


CLAIM_HEAD = "task, metric, equal | variant, than | difference | seeds | verdict |\n|---|---|---|---|---|---|---|"


def claim_row(c: Mapping[str, Any]) -> str:
    """A claim's places behind what it says."""
    where = f"{c['task']}, {c['metric']}, {c['budget'].replace('_', ' ')}"
    found = numbers(c) or c.get("error", "")
    if c["verdict"] == "confirmed" and c["mean"] < c["least"]:
        found += f"; less than the {c['least']:g} that matter"
    if "tuned" in c:
        best = "none was better" if c["tuned"] == c["lost"] else f"`{c['tuned']}` {numbers(c['again'])}"
        found += f"; learning rate of `{c['lost']}` searched: {best}"
    variants = f"`{c.get('variant') or c['method']}`, `{c['than']}`"
    return f"{where} | {variants} | {found} | {c.get('seeds', '')} | {c['verdict']} |"


def _together(told: Mapping[str, Any]) -> str:
    lines = []
    if told["attributions"]:
        lines += [
            "## Methods together",
            "",
            "Shapley values: what each method brought to the whole, mean over seeds.",
            "",
        ]
        lines += ["| task | seeds | method: value | all together |", "|---|---|---|---|"]
        for a in told["attributions"]:
            values = "; ".join(
                f"`{m}` {v['value']:+.3f} ({v['low']:+.3f} to {v['high']:+.3f})" for m, v in a["methods"].items()
            )
            lines.append(f"| {a['task']} | {a['seeds']} | {values} | {a['total']:+.3f} |")
        lines.append("")
    if told["stacks"]:
        lines += [
            "## The best stack",
            "",
            "Methods are added one by one on the seeds from 100 on, as long as that helps. What was found is compared "
            "on the seeds from 200 on, with GRPO, and with GRPO at the options that were best for it in the search.",
            "",
            "| task | stack | variants tried | against GRPO | against tuned GRPO |",
            "|---|---|---|---|---|",
        ]
        for s in told["stacks"]:
            columns = [f"{numbers(s[k])}, {s[k]['seeds']} seeds" if k in s else "" for k in ("grpo", "tuned")]
            than = f" (`{s['tuned']['than']}`)" if "tuned" in s else ""
            lines.append(f"| {s['task']} | `{s['variant']}` | {len(s['tried'])} | {columns[0]} | {columns[1]}{than} |")
        lines.append("")
    return "\n".join(lines)


def _hosts(told: Mapping[str, Any]) -> str:
    if not told["hosts"]:
        return ""
    lines = [
        "## The same in verl",
        "",
        "A sample of the variants was trained in verl, on the CPU. The hosts agree where the interval of the "
        "difference of their differences holds zero (Welch).",
        "",
        "| variant | task | from GRPO in TRL | from GRPO in verl | seeds | TRL minus verl | |",
        "|---|---|---|---|---|---|---|",
    ]
    for h in told["hosts"]:
        seeds = " and ".join(map(str, h["seeds"]))
        word = "agree" if h["agree"] else "differ"
        lines.append(
            f"| `{h['variant']}` | {h['task']} | {h['trl']:+.3f} | {h['verl']:+.3f} | {seeds} | "
            f"{h['low']:+.3f} to {h['high']:+.3f} | {word} |"
        )
    return "\n".join([*lines, ""])


def _costs(told: Mapping[str, Any]) -> str:
    lines = [
        "## What it cost",
        "",
        "Totals over those of GRPO at equal steps in the same task, mean over seeds.",
        "",
        "| variant | task | " + " | ".join(COSTS.values()) + " |",
        "|---|---|" + "---|" * len(COSTS),
    ]
    for c in sorted(told["costs"], key=lambda c: (c["variant"], list(TASKS).index(c["task"]))):
        lines.append(
            f"| `{c['variant']}` | {c['task']} | " + " | ".join(f"{c.get(k, float('nan')):.2f}" for k in COSTS) + " |"
        )
    return "\n".join([*lines, ""])


def _tasks() -> str:
    figure = ["![GRPO in each task](figures/bench/baseline.png)", ""] if tasks_run() else []
    lines = ["## Tasks", "", *figure, "| task | what is different | metric |", "|---|---|---|"]
    lines += [f"| `{name}` | {task.about} | {METRICS[task.metric][1]} |" for name, task in TASKS.items()]
    return "\n".join([*lines, ""])


def _not_tested(told: Mapping[str, Any]) -> str:
    waiting = [c for c in told["claims"] if c["verdict"] == "not run"]
    untested = [c for c in told["claims"] if c["verdict"] == "not tested"]
    lines = ["## Not run", ""]
    if empty := [f"`{task}`" for task in TASKS if task not in tasks_run()]:
        lines += [f"No variant has eight seeds in these tasks: {', '.join(empty)}.", ""]
    if waiting:
        lines += ["These claims have a task, and no run or too few seeds yet:", ""]
        lines += [f"- `{c.get('variant') or c['method']}` in {c['task']}: {c['says']}" for c in waiting]
        lines += [""]
    if untested:
        lines += ["These claims have no task:", ""]
        lines += [f"- `{c['method']}`: {c['says']} {c['untested']}" for c in untested]
    return "\n".join([*lines, ""])
