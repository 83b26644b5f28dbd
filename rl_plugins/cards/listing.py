"""`rl-plugins list`: methods and bundles by the problem they answer, or by the hooks they change."""

from __future__ import annotations

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest

import typer

from rl_plugins.cards.catalog import OURS, Entry, entries
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
    usable, broken = [e for e in found if not e.problem], [e for e in found if e.problem]
    if hooks:
        _by_hooks(usable)
    else:
        _by_problem(usable)
    if broken:
        print("Cannot be used")
        for e in broken:
            print(f"  {e.name}: {e.problem}")
        print()
    print("Use: `methods: [name, name]` in the config of a run.")
    print("`rl-plugins info NAME` explains one.")
    print(f"For supervised trainers, outside of `methods`: {', '.join(LOSSES)}. See docs/supervised.md.")
    if not hooks:
        print("`rl-plugins suggest` finds the methods for your run.")
        print("`rl-plugins list --hooks` shows what each changes.")


def _by_problem(found: Sequence[Entry]) -> None:
    groups = [(p.title, [e for e in found if key in e.problems]) for key, p in PROBLEMS.items()]
    groups.append(("Of no problem named here", [e for e in found if not e.problems]))
    for title, chosen in groups:
        _table(title, ["does", "fidelity"], [[e.name, e.does or e.title, e.fidelity] for e in chosen], chosen)


def _by_hooks(found: Sequence[Entry]) -> None:
    for kind, title, changes in (("method", "Methods", "changes"), ("bundle", "Bundles", "stands for")):
        chosen = [e for e in found if e.kind == kind]
        rows = [[e.name, e.arxiv, ", ".join(e.hooks), ", ".join(e.hosts) or "none", e.fidelity] for e in chosen]
        _table(title, ["paper", changes, "hosts", "fidelity"], rows, chosen)


def _table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]], of: Sequence[Entry]) -> None:
    """Prints a table as wide as the terminal; its widest column wraps first, between words. Tables of rich take half of
    the time of this command."""
    if not rows:
        return
    lines = [["name", *columns], *rows]
    if any(e.distribution != OURS for e in of):
        lines = [
            [*line, package] for line, package in zip(lines, ["package", *(e.distribution for e in of)], strict=True)
        ]
    columns_of = list(zip(*lines, strict=True))
    width = [max(map(len, column)) for column in columns_of]
    least = [max(len(word) for cell in column for word in cell.split() or [""]) for column in columns_of]
    room = shutil.get_terminal_size().columns - 2 * len(width)
    while sum(width) > room and (wider := [i for i, n in enumerate(width) if n > least[i]]):
        width[max(wider, key=width.__getitem__)] -= 1
    typer.secho(title, italic=True)
    for number, line in enumerate(lines):
        cells = [textwrap.wrap(cell, n, break_on_hyphens=False) for cell, n in zip(line, width, strict=True)]
        for parts in zip_longest(*cells, fillvalue=""):
            text = "  ".join(part.ljust(n) for part, n in zip(parts, width, strict=True))
            typer.secho(text.rstrip(), bold=number == 0)
    print()
