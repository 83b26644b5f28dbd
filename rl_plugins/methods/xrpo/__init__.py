"""XRPO (arXiv 2510.06672): rollouts for uncertain prompts, examples for failed prompts, and a bonus for rare right
answers."""

from __future__ import annotations

from rl_plugins import Bundle

XRPO = Bundle(
    "xrpo",
    parts={"xrpo_allocate": {}, "xrpo_seeds": {"second_round": False}, "xrpo_novelty": {}},
    does="Moves rollouts to uncertain prompts, adds solved examples and rewards rare right answers",
    problems=("no_signal", "too_hard", "few_prompts", "exploration"),
)
