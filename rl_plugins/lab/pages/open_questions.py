"""The page docs/open_questions.md: what no source says of a method, where it was looked for, and when."""

from __future__ import annotations

from collections.abc import Iterable

from rl_plugins.cards.catalog import entries, plugins
from rl_plugins.lab.pages.methods import table
from rl_plugins.runtime.card_file import card_file
from rl_plugins.tools import supervised

_HEAD = """\
# What is not known

<!-- Written by `make docs`; do not edit. -->

"Could not be read" is a statement with a date. This page lists, for
every method where something was not published or could not be read, the question with what we do, where the answer was
looked for, and the day of the last look. Methods whose fidelity is `code` or `paper` are here where a question is open.
If you find an answer, change the method and its card ([CONTRIBUTING.md](../CONTRIBUTING.md)).
"""


def page() -> str:
    """The whole page. Installed plugins are not part of it."""
    rows = [row for name, fidelity in _named() for row in _rows(name, fidelity)]
    return f"{_HEAD}\n{table(['method', 'fidelity', 'question', 'tried', 'last look'], rows)}\n"


def _named() -> Iterable[tuple[str, str]]:
    """Names of methods and supervised losses, and their fidelity."""
    yield from ((f"[{e.name}](methods.md#{e.name})", e.fidelity) for e in entries(plugins()) if e.kind == "method")
    yield from ((f"[{name}](supervised.md)", supervised.card_of(name).fidelity) for name in supervised.LOSSES)


def _rows(link: str, fidelity: str) -> Iterable[list[str]]:
    for asked in card_file(link[1 : link.index("]")]).open:
        yield [link, fidelity, asked.question, asked.tried, asked.looked.isoformat()]
