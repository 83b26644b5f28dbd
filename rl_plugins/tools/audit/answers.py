"""Right and wrong answers as an audit writes and reads them: numbers, choices and texts, each a callable to replace."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from decimal import Decimal, localcontext
from typing import Any, Literal

import numpy as np

from rl_plugins.kit.texts import between
from rl_plugins.tools.audit.rows import Row, normal

Kind = Literal["number", "choice", "text"]
Renderer = Callable[[str, Row], str]
Corrupter = Callable[[str, Row, np.random.Generator], Sequence[str]]

TEMPLATES = (
    "{answer}",
    "\\boxed{{answer}}",
    "#### {answer}",
    "<answer>{answer}</answer>",
    "The answer is {answer}.",
    "Answer: {answer}",
    "={answer}",
)
"""Ways to write an answer. The audit takes the one by which the reward tells right from wrong answers most often."""

_NUMBER = re.compile(r"-?\d[\d,]*(\.\d+)?")
_MOST_CHOICES = 26
# Answers that are marked, the surest mark first. `++` takes all there is and gives nothing back, so a pattern that does
# not match is done in one pass. `canonical` takes white space away.
_MARKED: tuple[Callable[[str], list[str]], ...] = (
    re.compile(r"\\boxed\{([^{}]*+)\}").findall,
    lambda text: between(text, "<answer>", "</answer>"),
    re.compile(r"####\s*+(.+)").findall,
    re.compile(r"answer(?: is)?[:\s]++\(?(-?[\w.,/]++)\)?[.\s]*(?:\n|$)", re.IGNORECASE).findall,
)
_LONGEST = 64  # characters of a completion that is an answer as a whole


def kind_of(golds: Sequence[str]) -> Kind:
    """What the answers of a dataset are."""
    numbers = sum(bool(_NUMBER.fullmatch(g.strip())) for g in golds)
    if numbers >= 0.95 * len(golds):
        return "number"
    distinct = {g.strip() for g in golds}
    few = len(distinct) <= min(_MOST_CHOICES, max(6, len(golds) // 2))
    return "choice" if few and all(len(g) <= 12 for g in distinct) else "text"


def template_renderer(template: str) -> Renderer:
    """Writes the answer where the template has `{answer}`."""
    return lambda gold, row: template.replace("{answer}", gold)


@dataclass(frozen=True)
class WrongAnswers:
    """Wrong answers that look like right ones: the default corrupter.

    A number gets one more, another sign, or another digit. A choice becomes another choice of the dataset, a text the
    answer of another row.

    Args:
        golds: right answers of the dataset.
        count: wrong answers of each row.
    """

    golds: Sequence[str]
    count: int

    def __call__(self, gold: str, row: Row, rng: np.random.Generator) -> list[str]:
        if _NUMBER.fullmatch(gold.strip()):
            candidates = wrong_numbers(gold.strip(), rng)
        else:
            candidates = [self.golds[i] for i in rng.permutation(len(self.golds))[:32].tolist()]
        wrong = [c for c in dict.fromkeys(candidates) if canonical(c) != canonical(gold)]
        return wrong[: self.count]


def wrong_numbers(gold: str, rng: np.random.Generator) -> list[str]:
    """Other numbers, in random order."""
    digits = [i for i, c in enumerate(gold) if c.isdigit()]
    at = digits[int(rng.integers(len(digits)))]
    other = str((int(gold[at]) + int(rng.integers(1, 10))) % 10)
    whole, point, rest = gold.replace(",", "").partition(".")
    with localcontext(prec=len(whole) + 1):  # `int` refuses thousands of digits
        one_more = Decimal(whole) + 1
    candidates = [
        f"{one_more:f}{point}{rest}",
        gold[1:] if gold.startswith("-") else f"-{gold}",
        gold[:at] + other + gold[at + 1 :],
    ]
    return [candidates[i] for i in rng.permutation(len(candidates)).tolist()]


def canonical(answer: str) -> str:
    """An answer in a form in which equal answers are equal texts."""
    text = normal(answer).strip("$ .")
    if not _NUMBER.fullmatch(text):
        return text
    number = text.replace(",", "")
    return (number.rstrip("0").rstrip(".") if "." in number else number) if float(number) else "0"


def extract_answer(text: str) -> str | None:
    """The final answer of a completion: what is boxed or marked, else the last number, else a short text as it is."""
    for marked in _MARKED:
        if found := marked(text):
            return canonical(found[-1])
    numbers = [m.group(0) for m in _NUMBER.finditer(text)]
    if numbers:
        return canonical(numbers[-1])
    return canonical(text) if 0 < len(text.strip()) <= _LONGEST else None


def text_answer(value: Any) -> str:
    """The right answer of a row as text; of a list its first item."""
    if isinstance(value, (list, tuple, np.ndarray)) and len(value):
        value = value[0]
    return str(value)
