"""The page docs/methods.md, a line a method, and the cards of the methods for the site."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path

import rl_plugins
from rl_plugins.cards.catalog import FIDELITY, Card, card_of, entries, example_of, needs_of, plugins, preset_text
from rl_plugins.cards.info import meaning, options_text, params_of_paper
from rl_plugins.cards.problems import PROBLEMS
from rl_plugins.cards.results import Result
from rl_plugins.core.method import Bundle, Method
from rl_plugins.core.params import MethodParams, describe_params
from rl_plugins.lab.bench.tasks import TASKS
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file

_HEAD = """\
# Methods

<!-- Written by `make docs`; do not edit. -->

[Which method is for me](choose.md) begins with your problem. `rl-plugins info NAME` shows everything about one method,
with a config to copy; the site has a page of each.

"Use" is what our measurements say, in [tasks of the bench](bench.md#tasks) and in [worlds](quality.md#worlds) with an
exact gradient; [choose.md](choose.md) has the reasons. Fidelity says what a method was checked against:

"""
LONGEST_DEFAULT = 60  # characters of a default in a table; `info` shows the whole


def index(on_site: bool = False) -> str:
    """The page docs/methods.md: a line for each built-in method and bundle.

    Args:
        on_site: a name leads to the page of the method; otherwise to its code.
    """
    vetoed = plugins()
    rows = []
    for entry in entries(vetoed):
        card = card_of(registry.load(entry.name, vetoed))
        home = f"[{card.name}](#{card.name})" if on_site else f'<a id="{card.name}"></a>[{card.name}]({_code_of(card)})'
        problems = ", ".join(PROBLEMS[key].title for key in card.problems)
        paper = f"[{entry.arxiv}](https://arxiv.org/abs/{entry.arxiv})"
        rows.append([home, card.does, problems, paper, card.fidelity, ", ".join(card.hosts), card.standing.word])
    text = _HEAD + bullets(f"**{name}**: {what}." for name, what in FIDELITY.items() if name != "own")
    return f"{text}\n\n{table(['name', 'does', 'problem', 'paper', 'fidelity', 'hosts', 'use'], rows)}\n"


def _code_of(card: Card) -> str:
    """The file of a method or bundle, from docs/."""
    module = registry.origins_of(card.name)[0].where.partition(":")[0]
    found = find_spec(module)
    assert found is not None and found.origin is not None
    return f"../{Path(found.origin).relative_to(Path(rl_plugins.__file__).parents[1]).as_posix()}"


def section(found: type[Method] | Bundle, whole: bool = True) -> str:
    """The card of one method or bundle, with a heading of the second level.

    Args:
        whole: with every formula and what was measured; False: for a page that shows these elsewhere.
    """
    card = card_of(found)
    p = card.file.paper
    assert p is not None
    code = f" Code: [{p.code}](https://github.com/{p.code})." if p.code else ""
    parts = [f"## {found.name}", f"[{p.title}]({p.url}), {p.authors}, {p.year}.{code}"]
    if found.does:
        parts.append(f"**{found.does}.**")
    if isinstance(found, Bundle):
        names = ", ".join(f"[{part}](#{part}){preset_text(values)}" for part, values in found.parts.items())
        parts.append(f"{card.file.about} Stands for: {names}.")
    else:
        parts.append(description(found) if whole else description(found).split("\n\n")[0])
        if card.file.use_when:
            parts.append(f"**Use it when:** {card.file.use_when}")
        if card.file.avoid_when:
            parts.append(f"**Not when:** {card.file.avoid_when}")
        if card.file.cost:
            parts.append(f"**What it costs:** {card.file.cost}")
    answered = [f"[{PROBLEMS[key].title}](choose.md#{slug(PROBLEMS[key].title)})" for key in found.problems]
    if answered:
        parts.append(f"**Problems it answers:** {', '.join(answered)}.")
    if whole:
        parts.append(with_links(f"**Whether to use it:** {card.standing.word}. {card.standing.why}".rstrip()))
        parts.append(f"**What we measured:** {measured(card.measured)}")
    if card.goes_with:
        parts.append("**Goes with:**\n\n" + bullets(f"[{n}](#{n}): {why}" for n, why in card.goes_with.items()))
    if not isinstance(found, Bundle):
        parts += _details(found)
    return "\n\n".join(parts)


def _details(cls: type[Method]) -> Iterable[str]:
    if needed := needs_of(cls):
        yield "**Needs:** " + "; ".join(needed) + "."
    if options := options_text(example_of(cls).host_options):
        yield "**Host options it sets:**\n\n" + bullets(options)
    if describe_params(cls.Params):
        yield parameter_table(cls.Params)
    if card_file(cls).disagreements:
        yield "**Where paper and code differ:**\n\n" + bullets(card_file(cls).disagreements)
    if card_file(cls).open:
        yield "**What is not known:**\n\n" + bullets(o.text for o in card_file(cls).open)
    if card_file(cls).paper_params:
        yield "**Parameters of the paper:**\n\n" + bullets(params_of_paper(card_file(cls)))


def parameter_table(params: type[MethodParams]) -> str:
    """Name, default, type, range and meaning of every parameter."""
    rows = [_row(r) for r in describe_params(params)]
    return table(["parameter", "default", "type", "range", "meaning"], rows)


def _row(r: Mapping[str, str]) -> list[str]:
    default = r["default"].replace("\n", "\\n").replace("`", "'")
    if len(default) > LONGEST_DEFAULT:
        default = default[: LONGEST_DEFAULT - 1].rstrip() + "…"
    return [f"`{r['name']}`", f"`{default}`" if default else "", r["type"], r["range"], meaning(r)]


def description(cls: type[Method]) -> str:
    """The docstring of a method as Markdown, formulas as blocks of code; what it raises is left to `info`."""
    return with_formulas(inspect.cleandoc(cls.__doc__ or ""))


def with_formulas(text: str) -> str:
    """A description as Markdown, formulas as blocks of code."""
    out: list[tuple[bool, str]] = []  # whether it is code
    for block in text.split("\n\n"):
        if block.startswith("Raises:"):
            continue
        for code, lines in groupby(block.splitlines(), key=lambda line: line.startswith("    ")):
            text = "\n".join(line[4:] if code else line for line in lines)
            if code and out and out[-1][0]:
                text = f"{out.pop()[1]}\n\n{text}"
            out.append((code, text))
    return "\n\n".join(f"```text\n{text}\n```" if code else text for code, text in out)


def measured(results: Iterable[Result]) -> str:
    """Results as one line, each with a link to the evidence."""
    texts = [f"{m.line} ([{m.page.removesuffix('.md')}]({m.page}#{m.where}))" for m in results]
    return "; ".join(texts) + "." if texts else "nobody measured it yet."


def with_links(text: str) -> str:
    """The text with a link at each task of the bench, to where it is described."""
    return re.sub(r"`([a-z]+(?:=\w+)?)`", lambda m: f"[{m[0]}](bench.md#tasks)" if m[1] in TASKS else m[0], text)


def slug(title: str) -> str:
    """The anchor that GitHub and site generators give a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def table(head: list[str], rows: Iterable[list[str]]) -> str:
    """A table of Markdown; a cell is one line, whatever stands in it."""
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in rows]
    lines = [f"| {' | '.join(row)} |" for row in [head, *cells]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])
