"""Part A1 of an audit: does the reward prefer the right answer to wrong ones, row by row?"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from rl_plugins.tools.audit.answers import TEMPLATES, Corrupter, Renderer, template_renderer, text_answer
from rl_plugins.tools.audit.findings import Finding
from rl_plugins.tools.audit.rows import (
    DatasetRows,
    Row,
    columns_of,
    normal,
    scalars_of,
    spread,
    text_of,
    with_cell,
    words_of,
)
from rl_plugins.tools.audit.scoring import Floats, RewardCaller

PART = "gold contrast"
SAMPLE = 32  # rows on which a template is chosen, and which show whether a function reads the right answer
SURE = 0.9  # share of rows on which a function must prefer the right answer to count as a judge of answers


@dataclass(frozen=True)
class Contrast:
    """How the rewards of right and wrong answers differ.

    Args:
        rows: numbers of the dataset rows.
        golds: the right answer of each, as text. rendered: as a completion.
        wrong: its wrong answers, as completions.
        gold: (rows, functions) rewards of the right answer.
        difference: (rows, functions) reward of the right answer - mean reward of the wrong ones.
        total: (rows,) weighted sum of these; NaN where no function that reads the right answer scored.
        reads: (functions,) whether the function looks at the right answer of the row.
        span: largest - smallest weighted reward.
        template: how answers were written; empty where a renderer was given.
    """

    rows: NDArray[np.int64]
    golds: Sequence[str]
    rendered: Sequence[str]
    wrong: Sequence[Sequence[str]]
    gold: Floats
    difference: Floats
    total: Floats
    reads: NDArray[np.bool_]
    span: float
    template: str

    def inverted(self, tol: float) -> NDArray[np.bool_]:
        """(rows,) whether a wrong answer is worth more than the right one."""
        return self.total < -tol * self.span if self.reads.any() else np.zeros(len(self.rows), dtype=bool)


def contrast(
    rows: DatasetRows,
    column: str,
    scorer: RewardCaller,
    renderer: Renderer | None,
    corrupter: Corrupter,
    rng: np.random.Generator,
) -> Contrast:
    """Scores the right and the wrong answers of every row.

    Args:
        column: of the right answer.
        renderer: None: the template is chosen, see `TEMPLATES`.
    """
    numbers = rows.numbers
    golds = [text_answer(columns_of(rows[n])[column]) for n in numbers]
    wrong = [list(corrupter(g, rows[n], rng)) for g, n in zip(golds, numbers, strict=True)]
    template = ""
    if renderer is None:
        template = _template(rows, numbers, golds, wrong, scorer)
        renderer = template_renderer(template)
    asked = [rows[n] for n in numbers]
    texts = [renderer(g, row) for g, row in zip(golds, asked, strict=True)]
    wrong_texts = [[renderer(w, row) for w in many] for many, row in zip(wrong, asked, strict=True)]
    flat = [(row, t) for row, many in zip(asked, wrong_texts, strict=True) for t in many]
    gold = scorer.score(asked, texts)
    bad = scorer.score([row for row, _ in flat], [t for _, t in flat])
    of = np.repeat(np.arange(len(asked)), [len(many) for many in wrong_texts])
    both = np.concatenate([scorer.total(gold), scorer.total(bad)])
    known = both[~np.isnan(both)]
    difference = gold - _means(bad, of, len(asked))
    reads = _reads(asked, golds, wrong, column, texts, scorer)
    scored = (~np.isnan(difference) & (reads | ~reads.any())).any(axis=1)
    return Contrast(
        rows=np.array(numbers, dtype=np.int64),
        golds=golds,
        rendered=texts,
        wrong=wrong_texts,
        gold=gold,
        difference=difference,
        total=np.where(scored, np.nansum(difference * scorer.weights, axis=1), np.nan),
        reads=reads,
        span=float(known.max() - known.min()) if len(known) else 0.0,
        template=template,
    )


def _means(values: Floats, of: NDArray[np.int64], n: int) -> Floats:
    """(n, columns) means per row over values that are known."""
    known = ~np.isnan(values)
    total, count = np.zeros((n, values.shape[1])), np.zeros((n, values.shape[1]))
    np.add.at(total, of, np.where(known, values, 0.0))
    np.add.at(count, of, known)
    with np.errstate(invalid="ignore"):
        return np.where(count > 0, total / count, np.nan)


def _template(
    rows: DatasetRows,
    numbers: Sequence[int],
    golds: Sequence[str],
    wrong: Sequence[Sequence[str]],
    scorer: RewardCaller,
) -> str:
    """The template by which the reward tells right from wrong answers on most rows; the first of equals."""
    places = [i for i in spread(range(len(numbers)), SAMPLE) if wrong[i]]
    if not places:
        return TEMPLATES[0]
    shares = []
    errors = dict(scorer.errors)
    for template in TEMPLATES:
        asked = [rows[numbers[i]] for i in places]
        right = scorer.total(scorer.score(asked, [template.replace("{answer}", golds[i]) for i in places]))
        bad = scorer.total(scorer.score(asked, [template.replace("{answer}", wrong[i][0]) for i in places]))
        shares.append((float(np.mean(np.abs(right - bad) > 0)), float(np.nanmean([0.0, *np.abs(right - bad)]))))
    scorer.errors = errors  # of templates that are not used
    return TEMPLATES[max(range(len(TEMPLATES)), key=lambda i: (shares[i], -i))]


def _reads(
    rows: Sequence[Row],
    golds: Sequence[str],
    wrong: Sequence[Sequence[str]],
    column: str,
    texts: Sequence[str],
    scorer: RewardCaller,
) -> NDArray[np.bool_]:
    """(functions,) whether the reward of the same completion changes with the right answer in the row."""
    places = [i for i in spread(range(len(rows)), SAMPLE) if wrong[i]]
    as_is = scorer.score([rows[i] for i in places], [texts[i] for i in places])
    errors = dict(scorer.errors)
    other = scorer.score([with_cell(rows[i], column, wrong[i][0]) for i in places], [texts[i] for i in places])
    scorer.errors = errors  # a wrong answer may be one that the function cannot read
    return np.asarray((np.nan_to_num(as_is, nan=-1e300) != np.nan_to_num(other, nan=-1e300)).any(axis=0))


def findings(rows: DatasetRows, c: Contrast, scorer: RewardCaller, column: str, tol: float) -> Iterator[Finding]:
    """What the contrast shows."""
    silent = [n for n, reads, ever in zip(scorer.names, c.reads, scorer.scored, strict=True) if ever and not reads]
    if silent:
        told = ", ".join(f"`{n}`" for n in silent)
        yield Finding("info", PART, "not_read", f"{told} gives the same reward whatever stands in `{column}`.")
    if not c.reads.any():
        yield Finding(
            "warn",
            PART,
            "blind",
            f"No reward function reads the right answer in `{column}`, or none could read the answers that were "
            f"tried. If one should, give `gold_renderer`: a function that writes an answer as the reward expects it.",
        )
        return
    limit = tol * c.span
    judged = ~np.isnan(c.total)
    inverted = c.inverted(tol)
    blind = judged & (np.abs(c.total) <= limit)
    if inverted.any():
        yield Finding(
            "critical",
            PART,
            "inverted",
            f"A wrong answer gets more reward than the right one on {_share(inverted, judged)}."
            f"{_common(rows, inverted)}",
            tuple(c.rows[inverted].tolist()),
            {"share": float(inverted.sum() / judged.sum())},
        )
    if blind.any():
        yield Finding(
            "warn",
            PART,
            "blind",
            f"Right and wrong answers get the same reward on {_share(blind, judged)}. The answer there may be written "
            f"in another form than the reward expects.",
            tuple(c.rows[blind].tolist()),
            {"share": float(blind.sum() / judged.sum())},
        )
    unscored = ~judged
    if unscored.any():
        yield Finding(
            "info",
            PART,
            "unscored",
            f"The reward gave none, or no wrong answer could be made, on {int(unscored.sum())} rows.",
            tuple(c.rows[unscored].tolist()),
        )
    yield from _of_functions(c, scorer, tol)


def _of_functions(c: Contrast, scorer: RewardCaller, tol: float) -> Iterator[Finding]:
    """Functions that are inverted where the weighted sum hides it."""
    if len(scorer.names) < 2:
        return
    told = c.inverted(tol)
    for k, name in enumerate(scorer.names):
        d = c.difference[:, k] * np.sign(scorer.weights[k])
        known = ~np.isnan(d)
        if not c.reads[k] or not known.any() or scorer.weights[k] == 0:
            continue
        limit = tol * float(np.abs(d[known]).max())
        wrong = known & (d < -limit) & ~told
        if wrong.any():
            sure = (d[known] > limit).mean() >= SURE
            yield Finding(
                "critical" if sure else "warn",
                PART,
                "inverted_function",
                f"`{name}` alone prefers a wrong answer on {_share(wrong, known)}, and the other functions hide it.",
                tuple(c.rows[wrong].tolist()),
            )


def _common(rows: DatasetRows, some: NDArray[np.bool_]) -> str:
    """What these rows have in common, and no other row: the value of a column, or a word of the prompt."""
    if some.all():
        return ""
    count: dict[str, list[int]] = {}
    for row, mine in zip(rows, some.tolist(), strict=True):
        marks = [f"{name} = {value!r}" for name, value in scalars_of(row).items()]
        marks += [f"the word {word!r} in the prompt" for word in sorted(set(words_of(normal(text_of(row)))))]
        for mark in marks:
            count.setdefault(mark, [0, 0])[mine] += 1
    found = next((m for m, (others, own) in count.items() if own == some.sum() and not others), None)
    return f" They, and no other rows, have {found}." if found and some.sum() > 1 else ""


def _share(some: NDArray[np.bool_], of: NDArray[np.bool_]) -> str:
    return f"{int(some.sum())} of {int(of.sum())} rows ({some.sum() / max(of.sum(), 1):.1%})"
