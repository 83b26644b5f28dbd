"""Judges for the digit lists of ``tasks``, by rule, where a real task would ask a language model.

``methods: [brpo]`` with ``method_params: {brpo: {judge: "rl_plugins.lab.demo.judges:digits"}}`` compares completions.
``methods: [rubric]`` with ``judge: "rl_plugins.lab.demo.judges:meets"`` and ``criteria: ["2: right"]`` scores them.
``methods: [fapo]`` with ``method_params: {fapo: {judge: "rl_plugins.lab.demo.judges:sloppy"}}`` looks for a flaw in
them.
"""

from __future__ import annotations

from rl_plugins.lab.demo.rewards import digit_score
from rl_plugins.lab.demo.tasks import CAREFUL, SLOPPY, solve


def digits(prompt: str, a: str, b: str) -> tuple[float, float]:
    """Scores of two completions from 0 to 10: 9 for all digits right, in proportion for some, 1 for the careful mark.

    Raises:
        ValueError: the prompt is none of the demo tasks.
    """
    answer = solve(prompt)
    return _score(a, answer), _score(b, answer)


def sloppy(prompt: str, answer: str, completion: str) -> int:
    """Index of the first wrong step: the sloppy mark ``?`` is one, at place 0; -1 without it."""
    return 0 if completion.startswith(SLOPPY) else -1


def meets(prompt: str, criterion: str, completion: str) -> float:
    """Whether a completion is `right` (in proportion to its digits), `careful` or `sloppy` (by its mark)."""
    if criterion == "right":
        return digit_score(completion, solve(prompt))
    return float(completion.startswith({"careful": CAREFUL, "sloppy": SLOPPY}[criterion]))


def _score(completion: str, answer: str) -> float:
    return 9.0 * digit_score(completion, answer) + float(completion.startswith(CAREFUL))
