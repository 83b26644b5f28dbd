"""DARS-B (arXiv 2508.13755): more rollouts for hard prompts, and the whole batch in every optimizer step."""

from __future__ import annotations

from rl_plugins import Bundle

DARS_B = Bundle(
    "dars_b",
    parts={"dars": {}, "dars_breadth": {}},
    does="Combines more rollouts for hard prompts with full-batch updates",
    problems=("exploration", "no_signal", "too_hard"),
)
