"""Tasks of reasoning-gym as rows for TRL: questions to train on, and others that are held out.

    cd examples/trl
    python reasoning_gym_data.py reasoning-gym     # writes train.jsonl and test.jsonl, for reasoning_gym.yaml

`train_reasoning_gym.py` and the notebook import it. reasoning-gym has about a hundred more tasks; name yours in TASKS
with the settings of its dataset, and keep those that your model solves sometimes.

Needs: pip install ".[trl]" reasoning-gym drawsvg
"""

from __future__ import annotations

import sys
from pathlib import Path

from rl_plugins.environments.reasoning_gym import split

TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "leg_counting": {"min_animals": 1, "max_animals": 3, "max_instances": 5},
}


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    from datasets import Dataset

    for name, rows in zip(("train", "test"), split(TASKS, 2000, 200), strict=True):
        Dataset.from_list(rows).to_json(Path(sys.argv[1]) / f"{name}.jsonl")
