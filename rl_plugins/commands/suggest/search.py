"""Which problems, methods, host options, commands and pages a sentence speaks of.

Everything that can be found is one row of a table of SQLite in memory. Its full-text index (FTS5, words by their stem)
ranks the rows by BM25. A row has three columns: its name, what users call it, and the rest of its text.
"""

from __future__ import annotations

import difflib
import re
import sqlite3
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from rl_plugins.cards.catalog import Card, cards
from rl_plugins.cards.problems import ANSWERS, PROBLEMS, Answer, Problem

WEIGHTS = (6.0, 4.0, 1.0)  # of the columns
NO_MEANING = frozenset(
    """
    a about after also am an and any are as at be because been but by can could did do does doing don for from
    get gets getting give given got had has have having how i if in into is isn it its just make me mine my of
    or our see seem seems should so some than that the their them then there these they thing this to too try
    trying us use used using very want was we were what when where which while who why will with would you your
    """.split()  # noqa: SIM905
)

Kind = Literal["problem", "method", "option", "tool", "page"]


@dataclass(frozen=True)
class Hit:
    """Something that a sentence speaks of.

    Attributes:
        kind: "problem", "method", "option", "tool" or "page".
        score: of BM25, larger is nearer.
        found: what it is.
    """

    kind: Kind
    name: str
    score: float
    found: Problem | Card | Answer

    @property
    def problems(self) -> tuple[str, ...]:
        """Keys of `PROBLEMS` that it is about."""
        return (self.name,) if isinstance(self.found, Problem) else self.found.problems


def search(sentence: str, host: str | None) -> list[Hit]:
    """Everything of this host, or of both, that has a word of the sentence; the nearest first."""
    rows = [*_rows(host)]
    table = sqlite3.connect(":memory:")
    table.execute("create virtual table texts using fts5(name, words, rest, tokenize='porter unicode61')")
    table.executemany("insert into texts values (?, ?, ?)", [text for _, _, text, _ in rows])
    asked = _asked(sentence, [" ".join(text) for _, _, text, _ in rows])
    if not asked:
        return []
    ranked = table.execute(
        f"select rowid, -bm25(texts, {', '.join(map(str, WEIGHTS))}) as score from texts where texts match ? "
        "order by score desc, rowid",
        [asked],
    )
    return [Hit(*rows[row - 1][:2], score, rows[row - 1][3]) for row, score in ranked]


Row = tuple[Kind, str, tuple[str, str, str], Problem | Card | Answer]


def _rows(host: str | None) -> Iterator[Row]:
    hosts = {host} if host else {"trl", "verl"}
    for key, problem in PROBLEMS.items():
        yield "problem", key, (f"{key} {problem.title}", problem.words, problem.seen), problem
    for answer in ANSWERS:
        if hosts & set(answer.use):
            options = " ".join(dict.fromkeys(answer.use.values()))
            yield answer.kind, answer.name, (answer.name, answer.words, f"{answer.does} {options}"), answer
    for card in cards():
        if hosts & set(card.hosts):
            file = card.file
            title = card.entry.title if file.paper else ""
            rest = f"{card.use_when} {' '.join(file.logs)}"
            yield "method", card.name, (f"{card.name} {title}", card.does, rest), card


def _asked(sentence: str, texts: Sequence[str]) -> str:
    """The sentence as a query: any of its words, and any two that follow each other. A word that no text has is taken
    for the nearest one that a text has."""
    known = sorted({word for text in texts for word in _words(text)})
    words = []
    for word in _words(sentence):
        if word in NO_MEANING:
            continue
        near = [] if len(word) < 4 or word in known else difflib.get_close_matches(word, known, 1, 0.85)
        words.append(*near or [word])
    phrases = [*words, *(f"{a} {b}" for a, b in pairwise(words))]
    return " OR ".join(f'"{phrase}"' for phrase in dict.fromkeys(phrases))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())
