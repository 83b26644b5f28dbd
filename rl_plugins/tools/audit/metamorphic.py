"""Part A2 of an audit: changes of the prompt that should not matter, and what they do to the reward."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from rl_plugins.tools.audit.contrast import Contrast
from rl_plugins.tools.audit.findings import Finding
from rl_plugins.tools.audit.rows import (
    DatasetRows,
    Row,
    scalars_of,
    text_of,
    with_cell,
    with_prompt,
    with_system,
    words_of,
)
from rl_plugins.tools.audit.scoring import RewardCaller

PART = "metamorphic"
NEUTRAL = "Please read the task carefully."
_CONFUSABLE = str.maketrans("aeopcxAEOPCX", "аеорсхАЕОРСХ")
_PADDING = " ".join(["This sentence says nothing about the task."] * 40)
CHANGES: dict[str, Callable[[str], str]] = {
    "sentence": lambda t: f"{NEUTRAL} {t}",
    "sentence_after": lambda t: f"{t} {NEUTRAL}",
    "invisible": lambda t: t.replace(" ", "\u200b ", 1) if " " in t else f"{t}\u200b",
    "confusable": lambda t: t.translate(_CONFUSABLE),
    "spaces": lambda t: f" {t.replace(' ', '  ')}\n",
    "upper": str.upper,
    "lower": str.lower,
    "length": lambda t: f"{t}\n\n{_PADDING}",
}
"""Changes of a prompt's text by name."""
FEATURES = (*CHANGES, "system", "columns", "words")
"""Everything that is changed; `declared_prompt_features` names some of it."""
BLOCK = 64  # words of the dataset that are inserted at once
MOST_WORDS = 4096
WORD_ROWS = 2  # rows that a block of words is tried on


@dataclass
class _Seen:
    """What a change did."""

    flipped: list[int] = field(default_factory=list)
    changed: list[int] = field(default_factory=list)


class PromptTrial:
    """DatasetRows with a right and a wrong answer, scored under changed prompts.

    Args:
        rows: of the dataset.
        c: of the same rows, unchanged.
        scorer: of the reward functions.
        places: which rows of `c` are tried.
        tol: of a difference, as a share of the reward's span.
    """

    def __init__(self, rows: DatasetRows, c: Contrast, scorer: RewardCaller, places: Sequence[int], tol: float) -> None:
        self.scorer, self.limit = scorer, tol * c.span
        self.places = [i for i in places if c.wrong[i] and not np.isnan(c.total[i])]
        self.rows = [rows[int(c.rows[i])] for i in self.places]
        self.numbers = [int(c.rows[i]) for i in self.places]
        self.texts = [(c.rendered[i], c.wrong[i][0]) for i in self.places]
        self.before = self._score(self.rows)

    def _score(self, rows: Sequence[Row], few: int | None = None) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        """(rows, 2) reward of the right and of the wrong answer."""
        texts = self.texts[:few]
        flat = self.scorer.score([r for r in rows for _ in (0, 1)], [t for pair in texts for t in pair])
        return self.scorer.total(flat).reshape(-1, 2)

    def tried(self, change: Callable[[Row], Row], few: int | None = None) -> _Seen:
        """Which rows turn their preference around, and which change at all."""
        after = self._score([change(row) for row in self.rows[:few]], few)
        before = self.before[:few]
        was, now = before[:, 0] - before[:, 1], after[:, 0] - after[:, 1]
        flips = ((was > self.limit) & (now < -self.limit)) | ((was < -self.limit) & (now > self.limit))
        same = (np.abs(after - before) <= self.limit) | (np.isnan(after) & np.isnan(before))
        return _Seen(
            [self.numbers[i] for i in flips.nonzero()[0]], [self.numbers[i] for i in (~same.all(axis=1)).nonzero()[0]]
        )


def vocabulary(texts: Sequence[str], most: int = MOST_WORDS) -> list[str]:
    """Words of the prompts, then pairs of neighbours, that stand in at least two of them, the rarest first."""
    words: Counter[str] = Counter()
    pairs: Counter[str] = Counter()
    for text in texts:
        found = words_of(text)
        words.update(set(found))
        pairs.update({f"{a} {b}" for a, b in itertools.pairwise(found)})
    chosen = [w for w, n in sorted(words.items(), key=lambda p: (p[1], p[0])) if n > 1][: most // 2]
    return chosen + [w for w, n in sorted(pairs.items(), key=lambda p: (p[1], p[0])) if n > 1][: most - len(chosen)]


def findings(
    rows: DatasetRows, c: Contrast, scorer: RewardCaller, places: Sequence[int], tol: float, declared: Sequence[str]
) -> Iterator[Finding]:
    """What changed prompts do to the reward."""
    trial = PromptTrial(rows, c, scorer, places, tol)
    if not trial.places:
        return
    for name, change in CHANGES.items():
        yield from _told(
            name,
            f"the change `{name}` of the prompt",
            trial.tried(lambda row, f=change: with_prompt(row, f)),  # type: ignore[misc]
            declared,
        )
    if any(not isinstance(row["prompt"], str) for row in trial.rows):
        yield from _told("system", "another system prompt", trial.tried(lambda r: with_system(r, NEUTRAL)), declared)
    yield from _columns(trial, c, declared)
    yield from _words(rows, trial, declared)


def _told(name: str, what: str, seen: _Seen, declared: Sequence[str]) -> Iterator[Finding]:
    if seen.flipped:
        yield Finding(
            "critical",
            PART,
            "flipped",
            f"With {what} the reward prefers the other answer.",
            tuple(seen.flipped),
            {"change": name},
        )
    elif seen.changed and name not in declared:
        yield Finding(
            "warn",
            PART,
            "depends",
            f"With {what} the reward of the same answer is another. If it should be, add {name} to "
            f"`declared_prompt_features`.",
            tuple(seen.changed),
            {"change": name},
        )


def _columns(trial: PromptTrial, c: Contrast, declared: Sequence[str]) -> Iterator[Finding]:
    """Columns of other rows. A column may hold the right answer once more, so nothing here is critical."""
    if "columns" in declared or len(trial.rows) < 2:
        return
    values: dict[str, list[object]] = {}
    for row in trial.rows:
        for name, value in scalars_of(row).items():
            values.setdefault(name, []).append(value)
    for name, found in values.items():
        distinct = list(dict.fromkeys(found))
        golds = {c.golds[i] for i in trial.places}
        if len(distinct) < 2 or set(map(str, distinct)) <= golds:
            continue
        seen = trial.tried(lambda row, n=name, d=distinct: with_cell(row, n, _other(row, n, d)))  # type: ignore[misc]
        changed = sorted({*seen.flipped, *seen.changed})
        if changed:
            turned = " and prefers the other answer" if seen.flipped else ""
            yield Finding(
                "warn",
                PART,
                "depends",
                f"With the column `{name}` of another row the reward of the same answer is another{turned}. If it "
                f"should be, add columns to `declared_prompt_features`.",
                tuple(changed),
                {"change": "columns", "column": name},
            )


def _other(row: Row, name: str, distinct: Sequence[object]) -> object:
    own = scalars_of(row).get(name)
    return next(v for v in distinct if v != own)


def _words(rows: DatasetRows, trial: PromptTrial, declared: Sequence[str]) -> Iterator[Finding]:
    """Words of the dataset, inserted in blocks; a block that matters is halved until one word is left."""
    words = vocabulary([text_of(row) for row in rows])

    def tried(block: Sequence[str]) -> _Seen:
        return trial.tried(lambda row: with_prompt(row, lambda t: f"{t} {' '.join(block)}"), WORD_ROWS)

    plain = tried(["the"] * min(BLOCK, len(words)))  # what the length of a block alone does
    length = bool(plain.changed)
    flipping, changing = [], []
    for start in range(0, len(words), BLOCK):
        block = words[start : start + BLOCK]
        seen = tried(block)
        if seen.flipped:
            flipping.append(_narrowed(block, lambda b: bool(tried(b).flipped)))
        elif seen.changed and not length:
            changing.append(_narrowed(block, lambda b: bool(tried(b).changed)))
    for severity, kind, found in (("critical", "flipped", flipping), ("warn", "depends", changing)):
        if found and (kind == "flipped" or "words" not in declared):
            told = ", ".join(repr(w) for w in found[:8])
            effect = "prefers the other answer" if kind == "flipped" else "of the same answer is another"
            advice = "" if kind == "flipped" else " If it should be, add words to `declared_prompt_features`."
            yield Finding(
                severity,  # type: ignore[arg-type]
                PART,
                kind,
                f"With {told} in the prompt the reward {effect}.{advice}",
                (),
                {"change": "words", "words": found},
            )


def _narrowed(block: Sequence[str], matters: Callable[[Sequence[str]], bool]) -> str:
    """The part of a block that matters: one word, or several that only matter together."""
    block = list(block)
    while len(block) > 1:
        half = len(block) // 2
        part = next((b for b in (block[:half], block[half:]) if matters(b)), None)
        if part is None:
            break
        block = part
    return " ".join(block)
