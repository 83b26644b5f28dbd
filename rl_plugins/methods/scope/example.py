"""Stand-ins for a process reward model and a stronger model, for tasks whose column `answer` holds the whole text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def score_steps(messages: Any, steps: Sequence[str], columns: Mapping[str, Any]) -> list[float]:
    """1 for each reasoning step up to which the text is the beginning of the answer, 0 for the others."""
    answer = str(columns.get("answer", ""))
    return [float(answer.startswith("".join(steps[: i + 1]).rstrip())) for i in range(len(steps))]


def finish(messages: Any, prefix: str, columns: Mapping[str, Any]) -> str:
    """The rest of the answer after the prefix."""
    return str(columns.get("answer", ""))[len(prefix) :]
