"""A pairwise judge for the digit lists of ``tasks``, by rule, where a real task would ask a language model.

``methods: [brpo]`` with ``method_params: {brpo: {judge: "rl_plugins.demo.judges:digits"}}``.
"""

from __future__ import annotations

from rl_plugins.demo.rewards import digit_score
from rl_plugins.demo.tasks import CAREFUL, solve


def digits(prompt: str, a: str, b: str) -> tuple[float, float]:
    """Scores of two completions from 0 to 10: 9 for all digits right, in proportion for some, 1 for the careful mark.

    Raises:
        ValueError: the prompt is none of the demo tasks.
    """
    answer = solve(prompt)
    return _score(a, answer), _score(b, answer)


def _score(completion: str, answer: str) -> float:
    return 9.0 * digit_score(completion, answer) + float(completion.startswith(CAREFUL))
