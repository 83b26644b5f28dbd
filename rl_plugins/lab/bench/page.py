"""The results of docs/bench.md on the site, from `published.json` and `claims.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rl_plugins.cards.claims import decide, measured, name_of, numbers, verdict_text
from rl_plugins.lab.bench.published import COSTS, methods_run, published
from rl_plugins.lab.bench.tasks import METRICS, TASKS

Told = Mapping[str, Any]
SECTIONS: Mapping[str, tuple[str, str]] = {
    "helps": ("What helped", "Ahead of what the claim names, at equal tokens decoded, and of the host's own way."),
    "waiting": (
        "Ahead of GRPO, with a control that was not run",
        "At equal tokens, too. Whether the host's own way does as much is not known.",
    ),
    "host": (
        "Ahead of GRPO, but not of a control",
        "The host's own way, or as many tokens for GRPO, were not seen to do less. Take that first.",
    ),
    "harmful": ("What did harm", "Behind GRPO, or behind a control, by more than what matters."),
    "within": (
        "What is bounded",
        "Runs would have shown what matters, and did not. The effect is no larger than the bound.",
    ),
    "cannot be seen here": (
        "What needs more than we had",
        "The last column is the number of seeds that would show the smallest difference that matters, at the spread of "
        "these runs. Larger batches, longer runs and other tasks may show what these cannot.",
    ),
}


def results() -> str:
    """What docs/bench.md shows on the site, after what it says of tasks and verdicts."""
    told = published()
    parts = [_intro(told)] + [_section(key, told["claims"]) for key in SECTIONS]
    parts += [_not_run(told["claims"]), _neutral(told), _together(told), _hosts(told)]
    return "\n".join(part.rstrip("\n") + "\n" for part in parts if part)


def section_of(claim: Told) -> str:
    """The section of a claim: its verdict; "waiting" or "host" where only a control keeps it from helping."""
    verdict, by = decide(claim)
    if not by or verdict in ("helps", "harmful"):
        return verdict
    return "host" if by in measured(claim) else "waiting"


def _intro(told: Told) -> str:
    return (
        f"## The claims\n\n{told['runs']} runs, the last one on {told['last']}. Each line is a claim, its interval in "
        "units of the smallest difference that matters; right of zero the method is the better one. Circles are the "
        "difference to what the claim names, squares that at equal tokens decoded, diamonds that to the host's own "
        "way.\n\n![Intervals of all claims](figures/bench/claims.png)\n"
    )


def _section(key: str, claims: Sequence[Told]) -> str:
    title, about = SECTIONS[key]
    of = [c for c in claims if section_of(c) == key]
    if not of:
        return ""
    rows = [f"| [`{c['method']}`](bench/{c['method']}.md) | {c['says']} | {claim_row(c)}" for c in of]
    return "\n".join([f"## {title}", "", about, "", "| method | the paper says | " + CLAIM_HEAD, *rows])


CLAIM_HEAD = "where | difference | verdict | seeds | seeds for what matters |\n|---|---|---|---|---|---|---|"


def claim_row(c: Told) -> str:
    """A claim's places behind what it says."""
    lower = ", lower is better" if c["better"] == "lower" else ""
    where = f"`{c.get('variant') or c['method']}` in {c['task']}: {c['metric']}{lower}, equal {_words(c['budget'])}"
    if "mean" not in c:
        return f"{where} | | {c.get('error') or verdict_text(c)} | | |"
    found = "; ".join(f"{numbers(d)} to {name_of(c, name)}" for name, d in measured(c).items())
    verdict, by = decide(c)
    d = measured(c).get(by, c)
    needed = round(d["seeds"] * (d["seen"] / c["least"]) ** 2) if verdict == "cannot be seen here" else ""
    return f"{where} | {found} | {verdict_text(c)} | {c['seeds']} | {needed} |"


def _words(name: str) -> str:
    return name.replace("_", " ")


def headline() -> str:
    """What README says of the bench, with links from the root of the repository."""
    told = published()
    of = {key: [c for c in told["claims"] if section_of(c) == key] for key in SECTIONS}
    claims = sum(map(len, of.values()))

    def named(key: str) -> str:
        return ", ".join(dict.fromkeys(f"`{c['method']}`" for c in of[key]))

    undecided = len(of["waiting"] + of["cannot be seen here"])
    return "\n".join(
        [
            f"{claims} claims of papers, {told['runs']} runs of a small policy beside GRPO and host options:\n",
            f"- **helped** ({len(of['helps'])} claims): {named('helps')}",
            f"- **did harm** ({len(of['harmful'])} claims): {named('harmful')}",
            f"- **no gain, or none over host options** ({len(of['host'] + of['within'])})",
            f"- **undecided** ({undecided})",
            f"\nBy chance alone {claims / 40:.1f} would help. [The bench](docs/bench.md) says how.",
        ]
    )


def _not_run(claims: Sequence[Told]) -> str:
    of = {v: [c for c in claims if decide(c)[0] == v] for v in ("not run", "failed", "not tested")}
    lines = ["## Not run", ""]
    if of["not run"] + of["failed"]:
        lines += ["These claims have a task, and no runs, too few, or runs that ended with an error:", ""]
        lines += [
            f"- `{c.get('variant') or c['method']}` in {c['task']}: {c['says']} {c.get('error', '')}".rstrip()
            for c in of["not run"] + of["failed"]
        ]
    if lacking := [c for c in claims if "mean" in c and "control" in c and "control" not in c.get("against", {})]:
        lines += ["", "The control of these claims was not run. It decides where a method is ahead of GRPO:", ""]
        lines += [f"- `{c.get('variant') or c['method']}` in {c['task']}: `{c['control']}`" for c in lacking]
    lines += ["", "These claims have no task:", ""]
    return "\n".join([*lines, *(f"- `{c['method']}`: {c['says']} {c['untested']}" for c in of["not tested"])])


def _neutral(told: Told) -> str:
    rows = [p for p in told["places"] if p["task"] == "neutral"]
    lines = [
        "## Where nothing asks for the method",
        "",
        "Difference from GRPO in `neutral`, right answers (share), at equal steps and at equal tokens decoded, and "
        "totals over GRPO's at equal steps.",
        "",
        PLACES_HEAD,
    ]
    return "\n".join([*lines, *(place_row(p, _linked(p["variant"])) for p in rows)])


PLACES_HEAD = (
    "| variant | task | equal steps | equal tokens | seeds | "
    + " | ".join(COSTS.values())
    + " |\n"
    + ("|---" * (5 + len(COSTS)) + "|")
)


def place_row(place: Told, variant: str) -> str:
    """A variant in a task, as a row below `PLACES_HEAD`."""
    if "error" in place:
        return f"| {variant} | {place['task']} | {place['error']} | | |" + " |" * len(COSTS)
    cost = " | ".join(f"{place['costs'][name]:.2f}" if name in place["costs"] else "" for name in COSTS)
    tokens = numbers(place["tokens"]) if place["tokens"] else ""
    return f"| {variant} | {place['task']} | {numbers(place)} | {tokens} | {place['seeds']} | {cost} |"


def _linked(variant: str) -> str:
    name = variant.partition("@")[0]
    return f"[`{variant}`](bench/{name}.md)" if name in methods_run() else f"`{variant}`"


def _together(told: Told) -> str:
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
    return "\n".join(lines)


def _hosts(told: Told) -> str:
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
    return "\n".join(lines)


def tasks() -> str:
    """A table of the tasks."""
    rows = [f"| `{n}` | {task.about} | {METRICS[task.metric][1]} |" for n, task in TASKS.items()]
    return "\n".join(["| task | what is different | metric |", "|---|---|---|", *rows])
