"""How good the gradient is that a method makes of rollouts, where the exact one is known.

`ExactWorld` gives rollouts, the score function of each (the gradient of its log-prob), and exact gradients of several
targets. `quality` compares estimates of the gradient with one of them:

    progress   <E g^, g>^2 / (|g|^2 E|g^|^2): the best expected gain of one step over all learning rates, relative to a
               step along g, where curvature is equal in all directions; 0 to 1, negative where the step is harmful
    direction  cosine of E g^ and g: 1 is unbiased up to scale
    noise      E|g^ - E g^|^2 / |E g^|^2 of a batch with the given number of rollouts

A method that makes more progress at one batch size can make less at another; `break_even` says where that changes.
Nothing here knows methods: `rl_plugins.lab.quality` drives them.
"""

from rl_plugins.kit.break_even import break_even
from rl_plugins.tools.gradient_quality.quality import Figure, Quality, progress_at, quality
from rl_plugins.tools.gradient_quality.worlds import Answers, AnswerTable, ExactWorld, read_pool, targets_of, write_pool

__all__ = [
    "Answers",
    "Figure",
    "Quality",
    "AnswerTable",
    "ExactWorld",
    "break_even",
    "progress_at",
    "quality",
    "read_pool",
    "targets_of",
    "write_pool",
]
