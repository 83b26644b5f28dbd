"""Reasoning steps of a completion: where they are in its text, and the first wrong one."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any


def split_steps(text: str, separator: str, least: int, size: Callable[[str], int] = len) -> list[str]:
    """The reasoning steps of a text, each followed by the separator; joined they are the text. A step of a `size` below
    `least` is joined to the next one, or, at the end, to the previous one."""
    pieces = [piece + separator for piece in text.split(separator)]
    pieces[-1] = pieces[-1][: -len(separator)]
    steps: list[str] = []
    held = ""
    for piece in pieces:
        held += piece
        if (piece.strip() or least <= 0) and size(held.strip()) >= least:  # white space makes no step longer
            steps.append(held)
            held = ""
    if held and steps:
        steps[-1] += held
    elif held:
        steps.append(held)
    return steps


def checked_scores(value: Any, count: int) -> list[float]:
    """What a process reward model answered, as one finite number per reasoning step.

    Raises:
        ValueError: the answer is not a list of numbers; the message says what was wrong.
    """
    try:
        scores = [float(v) for v in value]
    except (TypeError, ValueError):
        raise ValueError(f"an answer that is no list of numbers ({type(value).__name__})") from None
    if len(scores) != count:
        raise ValueError(f"{len(scores)} scores for {count} reasoning steps")
    if not all(math.isfinite(s) for s in scores):
        raise ValueError("scores that are not finite")
    return scores


def first_wrong(scores: Sequence[float], threshold: float, lowest: bool) -> int | None:
    """The number of the first reasoning step with a score below `threshold`; without one the lowest (the first of
    several) if `lowest`, else None."""
    below = next((i for i, s in enumerate(scores) if s < threshold), None)
    return min(range(len(scores)), key=scores.__getitem__) if below is None and lowest and scores else below
