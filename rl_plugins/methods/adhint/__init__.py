"""ADHint (arXiv 2512.13095): hints as long as a prompt is hard. Three methods, usable apart, and their bundle."""

from __future__ import annotations

from rl_plugins import Bundle

ADHINT = Bundle(
    "adhint",
    parts={"adhint_rollouts": {}, "adhint_advantages": {}, "adhint_gradients": {}},
    does="Begins half of a hard prompt's rollouts with a part of a reference solution",
    problems=("too_hard", "no_signal", "exploration"),
)
