"""Parameters with which a method has something to act on in the tasks of the bench; all others are the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARAMS: Mapping[str, Mapping[str, Any]] = {
    "aepo_rollout": {"vocabulary": 64},  # of the policy of the agents
    "arrol": {"detect_tokens": 5, "cold_start": 8},  # answers have 4 to 20 characters, runs 40 batches
    "best_perm": {"templates": ["{prompt}"] * 2},  # the policy knows no hints: further plain tries
    "branch_text_rollout": {"places": [0, 2, 4]},  # three splits make the 8 rollouts of a prompt
    "brorl": {"base_rows": 64},  # rows of a step that the learning rate was looked at with
    "brpo": {"judge": "rl_plugins.bench.chains:compare"},
    "dars": {"n_first": 4},  # half of the group; the other half is room for second rounds
    "dots": {"embeddings": "rl_plugins.bench.chains:embeddings", "references": 16},  # as many as two batches train
    "drive": {"sizes": [1.0, 0.5, 0.25], "batches": [20, 10], "rollouts": [8, 32, 32]},  # 40 batches in all
    "echo_labels": {"extract": "rl_plugins.bench.chains:answer_of"},
    "echo_tree": {  # answers have few characters, and the policy is sure of most of them
        "min_depth": 1,
        "entropy_low": 0.3,
        "entropy_high": 0.6,
        "entropy_delta_threshold": 0.0,
        "branch_threshold": 6.0,
        "max_branches": 2,
    },
    "fapo": {"judge": "rl_plugins.bench.chains:first_flaw"},
    "fission_grpo": {"role": "user", "message": "rl_plugins.bench.chains:mistake"},  # the policy knows no tools
    "grpo_roc": {"penalty": "rl_plugins.bench.chains:superfluous"},
    "latr": {
        "lookahead": [1, 2]
    },  # answers have 4 to 14 tokens; one tree with the paper's 20 to 50 would hold them all
    "linear_ts": {"column": "level", "draws": 16},
    "turn_control": {"strategy": "fixed", "remind_from": 0},  # the policies cannot read reminders
    "v0_5": {"prior": "nearest"},  # the paper's prior reads the prompt; a mean per prompt knows no new ones
}
