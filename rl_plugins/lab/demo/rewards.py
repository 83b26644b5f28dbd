"""Reward functions for the digit lists of ``tasks``, in the form TRL calls them, and a quality penalty for GRPO-RoC.

Every reward function takes ``(prompts, completions, completion_ids, **columns)`` and returns one float in [0, 1] per
row. It needs the column ``answer``. A completion is a string or, as TRL hands it over for chat prompts, a list of
messages; the last one counts. In a TRL YAML:
``reward_funcs: [rl_plugins.lab.demo.rewards.digits, rl_plugins.lab.demo.rewards.format]``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rl_plugins.lab.demo.tasks import CAREFUL, SLOPPY

if TYPE_CHECKING:
    import torch

EOS_ID = 1
"""End of sequence in the embedded tokenizer, the only one whose ``completion_ids`` mean something here."""

_ANSWER = re.compile(r"[=?]([0-9]+)")


def exact(
    prompts: Any, completions: Sequence[Any], completion_ids: Any = None, *, answer: Sequence[str], **columns: Any
) -> list[float]:
    """1 where a style mark and exactly the right digits were written, else 0."""
    return [float(read_digits(_text(c)) == a) for c, a in zip(completions, answer, strict=True)]


def digits(
    prompts: Any, completions: Sequence[Any], completion_ids: Any = None, *, answer: Sequence[str], **columns: Any
) -> list[float]:
    """Partial credit: positions with the right digit, divided by the longer of completion and answer.

    1 exactly where :func:`exact` is 1, and 0 where no digits could be read.
    """
    return [digit_score(_text(c), a) for c, a in zip(completions, answer, strict=True)]


def format(
    prompts: Any,
    completions: Sequence[Any],
    completion_ids: Sequence[Sequence[int]] | None = None,
    *,
    answer: Sequence[str],
    **columns: Any,
) -> list[float]:
    """Form apart from content: 0, 0.25, 0.5, 0.75 or 1, see :func:`format_score`.

    A completion whose ids do not end with the end-of-sequence token was truncated. Without ``completion_ids`` every
    completion counts as ended.
    """
    ended = (
        [True] * len(completions) if completion_ids is None else [list(ids[-1:]) == [EOS_ID] for ids in completion_ids]
    )
    return [format_score(_text(c), a, e) for c, a, e in zip(completions, answer, ended, strict=True)]


def careful(completions: Sequence[Any], **columns: Any) -> list[float]:
    """0.1 where the careful mark ``=`` comes first, else 0: a small reward next to large ones."""
    return [0.1 * _text(c).startswith(CAREFUL) for c in completions]


def points(prompts: Any, completions: Sequence[Any], *, answer: Sequence[str], **columns: Any) -> list[float]:
    """:func:`digits` as points, 0 to 100: a large reward."""
    return [100.0 * value for value in digits(prompts, completions, answer=answer)]


def mark(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 where the mark comes first that the task asks for, else 0: ``?`` for "unique", ``=`` for the others."""
    pairs = zip(prompts, completions, strict=True)
    return [float(_text(c).startswith(SLOPPY if _text(p).startswith("u") else CAREFUL)) for p, c in pairs]


def score(completions: Sequence[Any], score: Sequence[float | None] | None = None, **columns: Any) -> list[float]:
    """The score of the agent's environment, which rollout programs note in the column ``score``; 0 without one."""
    known = score if score is not None else [None] * len(completions)
    return [0.0 if s is None or s != s else float(s) for s in known]


def format_and_digit_errors(rollouts: Any) -> torch.Tensor:
    """Quality penalty for GRPO-RoC: ``(1 - format) + (1 - digits)`` per row, in [0, 2], lower is better.

    Among rows whose digits are all right, 0 for the careful mark ``=`` and 0.25 for the sloppy mark ``?``.

    Args:
        rollouts: Anything with ``text`` (completion strings) and ``meta["answer"]`` (strings), one entry per row.

    Returns:
        float64, shape (rows,).
    """
    import torch

    rows = zip(rollouts.text, rollouts.meta["answer"], strict=True)
    return torch.tensor([2.0 - format_score(text, a) - digit_score(text, a) for text, a in rows], dtype=torch.float64)


# What it reads, so that the host gathers it (see the method `grpo_roc`).
format_and_digit_errors.needs = {"text", "column:answer"}  # type: ignore[attr-defined]


def read_digits(text: str) -> str | None:
    """The digits after the style mark, or None where the text is anything but one mark and digits."""
    match = _ANSWER.fullmatch(text)
    return match.group(1) if match else None


def digit_score(text: str, answer: str) -> float:
    """Share of positions with the right digit, over the longer of the two; 0 without readable digits."""
    found = read_digits(text)
    if found is None:
        return 0.0
    return sum(a == b for a, b in zip(found, answer, strict=False)) / max(len(found), len(answer))


def format_score(text: str, answer: str, ended: bool = True) -> float:
    """A quarter each: a style mark comes first; it is the careful one; then digits only; as many as asked, and ended.

    A second mark is not a digit, so ``==1359`` loses the last two quarters.
    """
    marked = text[:1] in (CAREFUL, SLOPPY)
    body = text[1:] if marked else text
    only_digits = re.fullmatch("[0-9]+", body) is not None
    return (marked + (text[:1] == CAREFUL) + only_digits + (only_digits and ended and len(body) == len(answer))) / 4


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else completion[-1]["content"]
