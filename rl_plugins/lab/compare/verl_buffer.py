"""verl's replay buffer, watched: every variant logs alike what was generated, and none waits longer than another.

It stands in verl's own slot `trainer.v1.sampler.custom_sampler` and runs in the driver.
"""

from __future__ import annotations

import math
from collections import defaultdict
from numbers import Real
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_INTERVAL = 0.2  # seconds; verl's 2.0 would be most of a short step, and rl-plugins lowers it where methods run


class WatchedReplayBuffer(ReplayBuffer):
    """Adds to the metrics of a step, over all rollouts that were generated for it:

    - generated/reward, generated/rewards/<part>/mean: of the score, and of each number the reward function answers with
    - generated/frac_reward_zero_std: share of rollouts in groups of equal scores

    A row without a reward, or without a part (NaN or None), is left out of the mean of it.
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_INTERVAL)

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if partition_id == "train":
            rows = tq.kv_batch_get(
                keys=batch.keys, partition_id=partition_id, select_fields=["rm_scores", "extra_fields"]
            )
            scores = [float(row.sum()) for row in rows["rm_scores"]]
            answers = [getattr(row, "data", row).get("reward_extra_info", {}) for row in rows["extra_fields"]]
            metrics |= watched([key.split("_")[0] for key in batch.keys], scores, answers)
        return batch, metrics


def watched(groups: list[str], scores: list[float], answers: list[dict[str, Any]]) -> dict[str, float]:
    """The metrics of rollouts, given the group and score of each and what the reward function said of it."""
    of: dict[str, list[float]] = defaultdict(list)
    parts: dict[str, list[float]] = defaultdict(list)
    for group, score, answer in zip(groups, scores, answers, strict=True):
        for values, number in [(of[group], score), *((parts[name], value) for name, value in answer.items())]:
            if isinstance(number, Real) and not math.isnan(number):
                values.append(float(number))
    rated = [score for of_group in of.values() for score in of_group]
    flat = sum(len(s) for s in of.values() if s and max(s) == min(s))
    means = {"generated/reward": rated} | {f"generated/rewards/{name}/mean": values for name, values in parts.items()}
    share = {"generated/frac_reward_zero_std": flat / len(rated)} if rated else {}
    return share | {name: sum(values) / len(values) for name, values in means.items() if values}
