"""Rules without a model for the guard: sentences as claims, equal and contradicting claims, arithmetic."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Mapping, Sequence
from fractions import Fraction
from functools import lru_cache
from typing import Any, Literal

from rl_plugins.core.files import read_json
from rl_plugins.tools.messages.lineage import key

Verdict = Literal["green", "yellow", "red"]
VERDICTS: dict[str, Verdict] = {"green": "green", "yellow": "yellow", "red": "red"}

_END = re.compile(r"\n|(?<=[.!?])\s+")
_NUMBER = re.compile(r"\d+(?:[.,]\d+)*")
_NOT = re.compile(r"\b(?:not|no|never|cannot)\b|n't\b|n’t\b")
_OPERATIONS: dict[type, Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
_LONGEST = 200  # characters of a calculation


def split_claims(message: str) -> list[str]:
    """Atomic claims of a message: the fields of a JSON object, each as its own object, or else sentences and lines."""
    fields = _object(message)
    if fields is not None:
        return [json.dumps({name: value}, ensure_ascii=False) for name, value in fields.items()]
    parts = (part.strip() for part in _END.split(message))
    return [part for part in parts if re.search(r"\w", part)]


def compare_claims(claim: str, premises: Sequence[str]) -> tuple[Verdict, tuple[int, ...]]:
    """Compares a claim with confirmed ones by their words.

    Green: the same words. Red: the same words but for exactly one number, or but for a negation, or the same JSON
    field with another value. Yellow: anything else. "About 3 hours" against "3 hours" is yellow, because no rule here
    knows what words mean.

    Returns:
        The verdict, and the places of the premises it rests on.
    """
    mine = _facts(claim)
    against = []
    for i, premise in enumerate(premises):
        other = _facts(premise)
        if mine.key == other.key:
            return "green", (i,)
        if _contradict(mine, other):
            against.append(i)
    return ("red", tuple(against)) if against else ("yellow", ())


def check_arithmetic(claim: str) -> Verdict:
    """Red if a calculation in the claim, such as "12 * 3 = 36", is wrong; green if all are right; yellow without one.

    A result counts as right if it is the exact one rounded to its decimals.
    """
    found = [c for at in re.finditer("=", claim) if (c := _calculation(claim, at.start())) is not None]
    if not found:
        return "yellow"
    return "green" if all(found) else "red"


def verify_arithmetic(fields: Mapping[str, str]) -> Verdict:
    """`check_arithmetic` in the form of a verifier."""
    return check_arithmetic(fields["claim"])


def entail_by_words(fields: Mapping[str, Any]) -> tuple[Verdict, tuple[int, ...]]:
    """`compare_claims` in the form of an entailment."""
    return compare_claims(fields["claim"], fields["premises"])


def read_verdict(value: Any) -> Verdict:
    """The verdict in an answer: green, yellow or red; True, None or False; 1, 0 or -1.

    Raises:
        ValueError: anything else.
    """
    if isinstance(value, str) and value.strip().lower() in VERDICTS:
        return VERDICTS[value.strip().lower()]
    if value is None or value is True or value is False:
        return "yellow" if value is None else "green" if value else "red"
    if isinstance(value, (int, float)) and value in (-1, 0, 1):
        return {1: "green", 0: "yellow", -1: "red"}[int(value)]  # type: ignore[return-value]
    raise ValueError(
        f"{str(value)[:100]!r} is no verdict. It must be green, yellow or red, or True, None or False, or 1, 0 or -1."
    )


class _Facts:
    def __init__(self, text: str) -> None:
        self.key = key(text)
        self.numbers = tuple(n.replace(",", "") for n in _NUMBER.findall(self.key))
        self.skeleton = _NUMBER.sub("#", self.key)
        self.negations = len(_NOT.findall(self.key))
        self.plain = " ".join(_NOT.sub(" ", self.key).split()) if self.negations else self.key
        fields = _object(text)
        self.field = next(iter(fields.items())) if fields is not None and len(fields) == 1 else None


@lru_cache(maxsize=16384)
def _facts(text: str) -> _Facts:
    return _Facts(text)


def _contradict(a: _Facts, b: _Facts) -> bool:
    if a.field is not None and b.field is not None:
        return bool(a.field[0] == b.field[0] and a.field[1] != b.field[1])
    if a.numbers and a.skeleton == b.skeleton and len(a.numbers) == len(b.numbers):
        return sum(x != y for x, y in zip(a.numbers, b.numbers, strict=True)) == 1
    return a.plain == b.plain and a.negations % 2 != b.negations % 2


def _object(text: str) -> Mapping[str, Any] | None:
    if not text.lstrip().startswith("{"):
        return None
    try:
        found = read_json(text)
    except ValueError:
        return None
    return found if isinstance(found, dict) and found else None


def _calculation(text: str, equals: int) -> bool | None:
    """Whether the calculation on both sides of this sign is right; None if there is none."""
    start = equals
    while start > max(equals - _LONGEST, 0) and (text[start - 1].isdigit() or text[start - 1] in " .,+-*/×()"):
        start -= 1
    if start and (text[start - 1].isalnum() or text[start - 1] == "_") and not text[start : start + 1].isspace():
        return None  # it begins within a name: x2 + 3
    right = re.match(
        r"\s*(-?\d+(?:,\d{3})*(?:\.\d+)?)(?!\s*[-+*/×(^]?\s*[\w(])", text[equals + 1 : equals + 1 + _LONGEST]
    )
    left = re.sub(r"(?<=\d),(?=\d{3})", "", text[start:equals]).replace("×", "*").strip(" .,")
    if right is None or not re.search(r"[-+*/]", left):
        return None
    try:
        value = _evaluated(ast.parse(left, mode="eval").body)
    except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
        return None
    if value is None:
        return None
    stated = right[1].replace(",", "")
    decimals = len(stated.partition(".")[2])
    return abs(value - Fraction(stated)) <= Fraction(1, 2 * 10**decimals) * (decimals > 0 or value.denominator > 1)


def _evaluated(node: ast.expr) -> Fraction | None:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.USub, ast.UAdd)):
        value = _evaluated(node.operand)
        return None if value is None else -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        left, right = _evaluated(node.left), _evaluated(node.right)
        return None if left is None or right is None else _OPERATIONS[type(node.op)](left, right)
    return None
