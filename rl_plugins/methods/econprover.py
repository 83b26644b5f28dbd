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
        "model share the samples. `rl-plugins heads write` writes a run per head. In each of them the method "
        "`difficulty_slices` draws half of the prompts from the head's own slice of difficulty. `rl-plugins heads "
        "sample` spreads a fixed number of samples over the heads. Second, one model learns to choose between a direct "
        "answer and long reasoning. That is preference training and no part of `methods`: `rl-plugins mode-pairs` "
        "makes the pairs from a table of attempts, for TRL's DPOTrainer. docs/heads.md shows both."
    ),
    does="Trains heads of one model on slices of difficulty; commands write the runs and sample over them",
    problems=("exploration", "few_prompts"),
)
