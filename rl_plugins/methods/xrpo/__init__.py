"""XRPO (arXiv 2510.06672): rollouts for uncertain prompts, examples for failed prompts, and a bonus for rare right
answers."""

from __future__ import annotations

from rl_plugins.method import Bundle
from rl_plugins.methods.xrpo.allocator import PAPER, XrpoAllocate, allocate, half_width
from rl_plugins.methods.xrpo.novelty import XrpoNovelty, relative_likelihood
from rl_plugins.methods.xrpo.seeds import XrpoSeeds
from rl_plugins.methods.xrpo.similarity import tfidf_cosine

XRPO = Bundle(
    name="xrpo",
    parts={"xrpo_allocate": {}, "xrpo_seeds": {"second_round": False}, "xrpo_novelty": {}},
    paper=PAPER,
    about=(
        "Three parts that also work separately. Rollouts go to the prompts whose success rate is "
        "least certain (`xrpo_allocate`). Prompts that failed so far get solved examples in "
        "their context (`xrpo_seeds`). Unlikely right answers count more (`xrpo_novelty`). "
        "Without `xrpo_allocate` set `second_round` of `xrpo_seeds`. The paper has about 16 "
        "rollouts per prompt, and reports up to 4 % pass@1 over GRPO and GSPO."
    ),
    does="Moves rollouts to uncertain prompts, adds solved examples and rewards rare right answers",
    problems=("no_signal", "few_prompts", "exploration"),
    measured=(*XrpoAllocate.measured[:2], XrpoAllocate.measured[3], XrpoNovelty.measured[0], *XrpoSeeds.measured),
)

__all__ = [
    "XRPO",
    "XrpoAllocate",
    "XrpoNovelty",
    "XrpoSeeds",
    "allocate",
    "half_width",
    "relative_likelihood",
    "tfidf_cosine",
]
