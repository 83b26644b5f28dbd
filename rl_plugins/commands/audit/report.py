"""What `rl-plugins audit` prints and writes."""

from __future__ import annotations

import html
import json
from typing import Any

from rich.console import Console
from rich.text import Text

from rl_plugins.core.errors import printable
from rl_plugins.tools.audit import AuditReport, Finding, Options
from rl_plugins.tools.audit.findings import SEVERITIES

STYLES = {"critical": "bold red", "warn": "yellow", "info": "cyan"}
MEANING = {
    "critical": "The reward is wrong, on some rows or on all. Do not train before you know why.",
    "warn": "This may be meant. Look at it.",
    "info": "For your information.",
}
ADVICE = {
    "inverted": "Open one of these rows, and follow its path through the reward function by hand.",
    "inverted_function": "Open one of these rows, and call this function alone on its right answer.",
    "flipped": "Search the reward function for what it does with the prompt.",
    "opposite_reward": "Compare the two prompts of a pair: report.json has the words that differ.",
    "label_conflict": "Correct one label, or remove one row of each pair.",
    "blind": "Print the right answer and what the reward function reads from it.",
    "no_reward": "Call the function by hand on one row. Nothing can be trained with it.",
    "raised": "Fix the exception. During training it would end the run.",
}


def print_report(console: Console, report: AuditReport) -> None:
    """Facts, findings by severity, and the verdict."""
    for name, value in report.facts.items():
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        if shown != "":
            console.print(Text(f"  {name:<24}{printable(str(shown))}"))
    for severity in SEVERITIES:
        findings = report.at(severity)
        if not findings:
            continue
        console.print(Text(f"\n{severity.upper()}  {MEANING[severity]}", style=STYLES[severity]))
        for f in findings:
            console.print(Text(f"  {f.part}: {printable(f.shown)}"))
            if f.kind in ADVICE:
                console.print(Text(f"      next: {ADVICE[f.kind]}", style="dim"))
    if report.not_served:
        console.print(Text("\nNOT LOOKED AT", style="bold"))
        for name, why in report.not_served.items():
            console.print(Text(f"  {printable(f'{name}: {why}')}"))
    console.print(Text(f"\n{verdict(report)}", style="bold"))


def verdict(report: AuditReport) -> str:
    """The result in one sentence."""
    if report.critical:
        return f"{len(report.critical)} critical finding(s): the reward is wrong."
    if not report.looked:
        return "Nothing was looked at: no reward function could be asked about a right answer."
    looked = [name for name in report.not_served if not name.startswith("reward function ")]
    if looked:
        return f"No critical finding, but {len(looked)} part(s) of the audit could not be done."
    return "No critical finding. An audit cannot prove that a reward is right; it looks where errors usually are."


def plain(report: AuditReport, options: Options) -> dict[str, Any]:
    """The report as plain data."""
    told = {k: v for k, v in vars(options).items() if not callable(v)}
    return {"verdict": verdict(report), "options": told, **report.plain()}


def as_html(report: AuditReport, options: Options) -> str:
    """The report as one page without scripts or links."""
    e = html.escape
    parts = [f"<h1>Reward audit</h1><p class=verdict>{e(verdict(report))}</p>"]
    facts = "".join(f"<tr><th>{e(k)}<td>{e(str(v))}" for k, v in report.facts.items())
    parts.append(f"<table>{facts}</table>")
    for severity in SEVERITIES:
        if report.at(severity):
            rows = "".join(_html_finding(f) for f in report.at(severity))
            parts.append(f"<h2 class={severity}>{severity}</h2><p>{e(MEANING[severity])}</p>{rows}")
    if report.not_served:
        listed = "".join(f"<li><b>{e(k)}</b>: {e(v)}" for k, v in report.not_served.items())
        parts.append(f"<h2>Not looked at</h2><ul>{listed}</ul>")
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;max-width:60em;margin:2em auto;padding:0 1em;color:#222;"
        "background:#fff}.verdict{font-weight:600}th{text-align:left;padding-right:2em;font-weight:400;color:#666}"
        ".critical{color:#b00020}.warn{color:#a06000}.info{color:#00607a}"
        "section{border-left:3px solid #ddd;padding-left:1em;margin:1em 0}pre{white-space:pre-wrap;color:#555}"
        "@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}pre,th{color:#aaa}}"
    )
    seed = f"<p>Seed {options.seed}, at most {options.max_rows} rows.</p>"
    body = "\n".join([*parts, seed])
    return f"<!doctype html><meta charset=utf-8><title>Reward audit</title><style>{style}</style>\n{body}\n"


def _html_finding(f: Finding) -> str:
    e = html.escape
    advice = f"<p>Next: {e(ADVICE[f.kind])}</p>" if f.kind in ADVICE else ""
    details = json.dumps(dict(f.details), indent=1, default=str) if f.details else ""
    more = f"<details><summary>details</summary><pre>{e(details)}</pre></details>" if details else ""
    return f"<section><b>{e(f.part)}</b><p>{e(f.shown)}</p>{advice}{more}</section>"
