"""Final answers of mathematical texts in a form that can be compared."""

from __future__ import annotations

import re


def boxed_answer(text: str) -> str | None:
    """The content of the last \\boxed{...} of a text, in a canonical form; None if there is none."""
    content = last_box(text)
    return None if content is None else canonical(content)


def last_box(text: str) -> str | None:
    """The content of the last \\boxed{...} of a text, unchanged; None without one or where it never closes."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    begin = start + len("\\boxed{")
    depth, end = 1, begin
    while end < len(text) and depth:
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        end += 1
    return None if depth else text[begin : end - 1]


def canonical(answer: str) -> str:
    """Without spaces, dollar signs, a final period and thousands separators; numbers without sign +, leading zeros and
    zeros after the decimal point."""
    answer = re.sub(r"\\[,;!: ]|[\s$]", "", answer).removesuffix(".")
    if re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", answer):
        answer = answer.replace(",", "")
    number = re.fullmatch(r"([+-]?)(\d+)(?:\.(\d*))?", answer)
    if number:
        sign, whole, part = number[1], number[2].lstrip("0") or "0", (number[3] or "").rstrip("0")
        value = whole + (f".{part}" if part else "")
        return f"-{value}" if sign == "-" and value != "0" else value
    return answer
