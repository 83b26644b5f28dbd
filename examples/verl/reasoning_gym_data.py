"""Tasks of reasoning-gym for verl: questions as parquet files, and the reward function.

    python examples/verl/reasoning_gym_data.py FOLDER      writes train.parquet and test.parquet

`compute_score` is named in the run by reward.custom_reward_function (see reasoning_gym.sh). reasoning-gym has about a
hundred more tasks; name yours in TASKS with the settings of its dataset, and keep those that your model solves
sometimes.

Needs: pip install -c constraints.txt ".[verl]" reasoning-gym drawsvg
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from rl_plugins.environments import reasoning_gym

TASKS = {
    "chain_sum": {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 2},
    "products": {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 2},
    "leg_counting": {"min_animals": 1, "max_animals": 3, "max_instances": 5},
}
TRAIN, HELD_OUT = 2000, 200
BRIEF_WEIGHT = 0.5


def compute_score(**columns: Any) -> dict[str, float]:
    """Rewards of one completion: "score", which is trained, and its parts, which methods see by
    +rl_plugins.rewards.NAME=weight: "solved", the task's own scorer gives full marks, and "brief"."""
    parts = reasoning_gym.compute_score(**columns)
    return {**parts, "score": parts["solved"] + BRIEF_WEIGHT * parts["brief"]}


def main(folder: Path) -> None:
    from datasets import Dataset

    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in zip(("train", "test"), reasoning_gym.split(TASKS, TRAIN, HELD_OUT), strict=True):
        Dataset.from_list(reasoning_gym.verl_rows(rows, name)).to_parquet(folder / f"{name}.parquet")


if __name__ == "__main__":
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    main(Path(sys.argv[1]))
