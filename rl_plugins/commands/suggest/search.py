"""Which problems, methods, host options, commands and pages a sentence speaks of.

Every name, every phrase that users have for a thing, every sentence about it and what users said of it in threads is a
row of a table of SQLite in memory. Its full-text index (FTS5, words by their stem) ranks the rows by BM25. A thing has
the score of its best row, 0.6 of that of the second, 0.36 of that of the third, and so on.
"""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Literal

from rl_plugins.cards.catalog import Card, cards
from rl_plugins.cards.problems import ANSWERS, HOSTS, PROBLEMS, Answer, Problem, said
from rl_plugins.core.errors import nearest

Kind = Literal["problem", "method", "option", "tool", "page", "elsewhere"]
PHRASE, SENTENCE = 1.0, 0.5  # weights of a row that is a name or a phrase of users, and of one that is a sentence
NEXT = 0.6  # what a further row of a thing counts beside the one before; by leaving out lots of the phrases of users
NO_MEANING = frozenset(
    """
    a about after also am an and any are as at be because been but by can could did do does doing don for from get
    gets getting give given got had has have having how i if in into is isn it its just make me mine my of on or our
    see seem seems should so some than that the their them then there these they thing this to too try trying us
    use used using very want was we were what when where which while who why will with would you your
    """.split()  # noqa: SIM905
)


Thing = tuple[Kind, str, Problem | Card | Answer, list[tuple[float, str]]]


@dataclass(frozen=True)
class Hit:
    """Something that a sentence speaks of.

    Attributes:
        score: larger is nearer.
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
    table, things, known = _table((host,) if host else HOSTS)
    asked = _asked(sentence, known)
    scores: dict[int, list[float]] = defaultdict(list)
    ranked = "select thing, -bm25(texts) * weight as score from texts where text match ? order by score desc"
    for i, score in table.execute(ranked, [asked]) if asked else ():
        scores[i].append(score * NEXT ** len(scores[i]))
    hits = (Hit(*things[i][:2], sum(found), things[i][2]) for i, found in sorted(scores.items()))
    return sorted(hits, key=lambda hit: -hit.score)


def everything(host: str | None) -> list[Hit]:
    """All that an answer can be, for this host or for both."""
    return [Hit(kind, name, 0, found) for kind, name, found, _ in _things({host} if host else set(HOSTS))]


@cache
def _table(hosts: tuple[str, ...]) -> tuple[sqlite3.Connection, list[Thing], frozenset[str]]:
    """The table, the things by their number in it, and all words of its texts."""
    things = list(_things(set(hosts)))
    rows = [(text, i, weight) for i, (_, _, _, texts) in enumerate(things) for weight, text in texts]
    number = {name if kind == "method" else f"{kind}:{name}": i for i, (kind, name, *_) in enumerate(things)}
    rows += [(text, number[name], PHRASE) for text, names in said() for name in names if name in number]
    table = sqlite3.connect(":memory:")
    columns = "text, thing unindexed, weight unindexed, tokenize='porter unicode61'"
    table.execute(f"create virtual table texts using fts5({columns})")
    table.executemany("insert into texts values (?, ?, ?)", rows)
    return table, things, frozenset(word for text, _, _ in rows for word in _words(text))


def _things(hosts: set[str]) -> Iterator[Thing]:
    for key, problem in PROBLEMS.items():
        yield "problem", key, problem, _texts(problem.title, problem.words, problem.seen)
    for answer in ANSWERS:
        if hosts & set(answer.use):
            options = " ".join(dict.fromkeys(answer.use.values()))
            yield answer.kind, answer.name, answer, _texts(answer.name, answer.words, answer.does, options)
    for card in cards():
        if hosts & set(card.hosts):
            title = card.file.paper.title.partition(":")[0] if card.file.paper else ""
            yield (
                "method",
                card.name,
                card,
                _texts(_joined(card.name), card.file.words, card.does, card.use_when, title),
            )


def _texts(name: str, words: str, *sentences: str) -> list[tuple[float, str]]:
    phrases = [name, *(phrase for phrase in words.split(";") if phrase.strip())]
    return [*((PHRASE, phrase) for phrase in phrases), *((SENTENCE, sentence) for sentence in sentences)]


def _joined(name: str) -> str:
    """A name of several words as one, so that a sentence has to name all of them: "dynamicsampling"."""
    return "".join(_words(name))


def _asked(sentence: str, known: frozenset[str]) -> str:
    """The sentence as a query: any of its words, and any two that follow each other as one name. A word that is not
    known is taken for one of the same letters, or for the nearest one that is."""
    words: list[str] = []
    for word in _words(sentence):
        if word not in NO_MEANING:
            near = []
            if len(word) >= 4 and word not in known:
                near = [w for w in known if sorted(w) == sorted(word)] or nearest(word, known, 0.85)
            words.append(*near[:1] or [word])
    return " OR ".join(f'"{word}"' for word in dict.fromkeys([*words, *(a + b for a, b in pairwise(words))]))


def _words(text: str) -> list[str]:
    return re.findall(r"[^\W_]+", text.lower())
