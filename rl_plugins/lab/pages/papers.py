"""The page of papers: every paper that was reviewed, with what became of it."""

from __future__ import annotations

from collections.abc import Iterable

from rl_plugins.cards.catalog import entries, plugins
from rl_plugins.lab.pages.methods import table
from rl_plugins.runtime.card_file import Paper, card_file
from rl_plugins.runtime.papers import Verdict, reviewed
from rl_plugins.tools import supervised

_HEAD = """\
# Papers

Every paper that was reviewed for this package, and what became of it. Made from the cards of the methods and from
`rl_plugins/runtime/papers.toml`.
"""

_SECTIONS: dict[Verdict, tuple[str, str]] = {
    "elsewhere": ("Built, not as a method", "where"),
    "open": ("Not built yet", "what it is"),
    "no": ("Reviewed and not built", "why"),
}


def page() -> str:
    """The whole page. Installed plugins are not part of it."""
    built, asked = list(_methods(asked=False)), list(_methods(asked=True))
    parts = [_HEAD.rstrip(), f"## Methods\n\n{len(built)} papers.", table(["paper", "methods", "fidelity"], built)]
    parts += ["## Asked for by users", table(["paper", "methods", "fidelity", "asked for"], asked)]
    for verdict, (title, column) in _SECTIONS.items():
        rows = [[_linked(p.title, p.arxiv), p.why] for p in reviewed().values() if p.verdict == verdict]
        if verdict == "elsewhere":
            rows = [*_losses(), *rows]
        if rows:
            parts += [f"## {title}", table(["paper", column], rows)]
    return "\n\n".join(parts) + "\n"


def _methods(asked: bool) -> Iterable[list[str]]:
    """A paper, its methods and bundles, their fidelity, and who asked for them where users did; by title."""
    vetoed = plugins()
    found: dict[str, tuple[Paper, list[str], list[str], list[str]]] = {}
    for entry in entries(vetoed):
        card = card_file(entry.name)
        assert card.paper is not None
        if bool(card.asked_for) == asked:
            _, names, fidelity, by = found.setdefault(card.paper.arxiv, (card.paper, [], [], []))
            names.append(f"[{entry.name}](methods.md#{entry.name})")
            fidelity += [entry.fidelity] if entry.fidelity not in fidelity else []
            by += [card.asked_for] if asked and card.asked_for not in by else []
    for paper, names, fidelity, by in sorted(found.values(), key=lambda f: f[0].title.lower()):
        yield [_linked(paper.title, paper.arxiv), ", ".join(names), ", ".join(sorted(fidelity)), *by]


def _losses() -> Iterable[list[str]]:
    for name in supervised.LOSSES:
        paper = card_file(name).paper
        assert paper is not None
        yield [_linked(paper.title, paper.arxiv), f"[`{name}`](supervised.md), a loss for supervised trainers."]


def _linked(title: str, arxiv: str) -> str:
    return f"[{title}](https://arxiv.org/abs/{arxiv})"
