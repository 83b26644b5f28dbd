"""ADHint (arXiv 2512.13095): hints as long as a prompt is hard. Three methods, usable apart, and their bundle."""

from __future__ import annotations

from rl_plugins.method import Bundle
from rl_plugins.methods.adhint.advantages import AdhintAdvantages
from rl_plugins.methods.adhint.gradients import AdhintGradients
from rl_plugins.methods.adhint.hints import PAPER
from rl_plugins.methods.adhint.rollouts import AdhintRollouts

ADHINT = Bundle(
    name="adhint",
    parts={"adhint_rollouts": {}, "adhint_advantages": {}, "adhint_gradients": {}},
    paper=PAPER,
    about=(
        "ADHint-style: most formulas of the paper could not be read and are ours. Half of a group begins with a part "
        "of a reference solution, the longer the harder the prompt is now (`adhint_rollouts`). Advantages allow for "
        "the easier task of these rollouts (`adhint_advantages`). Tokens of hints are learned where the policy is as "
        "sure of them as of its own, and never pushed down (`adhint_gradients`)."
    ),
    does="Begins half of a hard prompt's rollouts with a part of a reference solution",
    problems=("no_signal", "exploration"),
)

__all__ = ["ADHINT", "AdhintAdvantages", "AdhintGradients", "AdhintRollouts"]
