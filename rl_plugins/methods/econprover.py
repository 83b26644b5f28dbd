"""EconProver (arXiv 2509.12603): the bundle, which says where each of its pieces is."""

from __future__ import annotations

from rl_plugins import Bundle

ECONPROVER = Bundle(
    "econprover",
    parts={"difficulty_slices": {"heads": 8, "own_share": 0.5}},
    does="Trains heads of one model on slices of difficulty; commands write the runs and sample over them",
    problems=("exploration", "few_prompts"),
)
