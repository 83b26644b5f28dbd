"""`rl-plugins list`: methods and bundles by the problem they answer, or by the hooks they change."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from rich.console import Console
from rich.table import Table

from rl_plugins.cards.catalog import Entry, entries
from rl_plugins.cards.problems import PROBLEMS
from rl_plugins.tools.supervised import LOSSES


def print_list(as_json: bool = False, hooks: bool = False) -> None:
    """All methods and bundles, as tables or as JSON.

    Args:
        hooks: by what they change, with paper, hosts and fidelity, instead of by problem.
    """
    found = entries()
    if as_json:
        print(json.dumps([asdict(e) for e in found], indent=2))
        return
    console = Console()
    usable, broken = [e for e in found if not e.problem], [e for e in found if e.problem]
    if hooks:
        _by_hooks(console, usable)
    else:
        _by_problem(console, usable)
    if broken:
        console.print("Cannot be used")
        for e in broken:
            console.print(f"  {e.name}: {e.problem}", markup=False, highlight=False)
        console.print()
    print("Use: `methods: [name, name]` in the config of a run. `rl-plugins info NAME` explains one.")
    print(f"For supervised trainers, outside of `methods`: {', '.join(LOSSES)}. See docs/supervised.md.")
    if not hooks:
        print("`rl-plugins suggest` finds the methods for your run. `rl-plugins list --hooks` shows what each changes.")


def _by_problem(console: Console, found: Sequence[Entry]) -> None:
    groups = [(p.title, [e for e in found if key in e.problems]) for key, p in PROBLEMS.items()]
    groups.append(("Of no problem named here", [e for e in found if not e.problems]))
    foreign = any(e.distribution != "rl-plugins" for e in found)
    for title, chosen in groups:
        table = _table(title, ["does", "fidelity", *(["package"] if foreign else [])])
        for e in chosen:
            table.add_row(e.name, e.does or e.title, e.fidelity, *([e.distribution] if foreign else []))
        if chosen:
            console.print(table)
            console.print()


def _by_hooks(console: Console, found: Sequence[Entry]) -> None:
    for kind, title, changes in (("method", "Methods", "changes"), ("bundle", "Bundles", "stands for")):
        chosen = [e for e in found if e.kind == kind]
        foreign = any(e.distribution != "rl-plugins" for e in chosen)
        table = _table(title, ["paper", changes, "hosts", "fidelity", *(["package"] if foreign else [])])
        for e in chosen:
            cells = [e.name, e.arxiv, ", ".join(e.hooks), ", ".join(e.hosts) or "none", e.fidelity]
            table.add_row(*cells, *([e.distribution] if foreign else []))
        if chosen:
            console.print(table)
            console.print()


def _table(title: str, columns: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
    table.add_column("name", no_wrap=True)
    for column in columns:
        table.add_column(column, no_wrap=column == "paper")
    return table
