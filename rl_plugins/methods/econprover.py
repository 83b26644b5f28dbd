"""EconProver (arXiv 2509.12603): the bundle, which says where each of its pieces is."""

from __future__ import annotations

from rl_plugins.method import Bundle
from rl_plugins.methods.difficulty_slices import DifficultySlices

ECONPROVER = Bundle(
    name="econprover",
    parts={"difficulty_slices": {"heads": 8, "own_share": 0.5}},
    paper=DifficultySlices.paper,
    about=(
        "The paper lowers the cost of many samples per problem in two ways. First, several small heads on one base "
        "model share the samples, and each is trained by a run of its own. In each of them the method "
        "`difficulty_slices` draws half of the prompts from the head's own slice of difficulty. Second, one model "
        "learns to choose between a direct answer and long reasoning. That is preference training and no part of "
        "`methods`."
    ),
    does="Trains heads of one model, each by a run of its own on a slice of difficulty",
    problems=("exploration", "few_prompts"),
)
