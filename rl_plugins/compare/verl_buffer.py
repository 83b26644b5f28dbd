"""verl's replay buffer, watched: what was generated is logged alike in every arm, and no arm waits longer than another.

It stands in verl's own slot `trainer.v1.sampler.custom_sampler` and runs in the driver.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import transfer_queue as tq
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1.replay_buffer import ReplayBuffer

POLL_INTERVAL = 0.2  # seconds; verl's 2.0 would be most of a short step, and rl-plugins lowers it where methods run


class WatchedReplayBuffer(ReplayBuffer):
    """Adds to the metrics of a step, over all rollouts that were generated for it:

    - generated/reward, generated/rewards/<part>/mean: of the score, and of each number the reward function answers with
    - generated/frac_reward_zero_std: share of rollouts in groups of equal scores
    - generated/num_tokens: of prompts and completions since the start of the run
    """

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs, poll_interval=POLL_INTERVAL)
        self.tokens = 0

    def sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        batch, metrics = super().sample(global_steps=global_steps, partition_id=partition_id, batch_size=batch_size)
        if partition_id == "train":
            rows = tq.kv_batch_get(
                keys=batch.keys, partition_id=partition_id, select_fields=["rm_scores", "extra_fields"]
            )
            scores = [float(row.sum()) for row in rows["rm_scores"]]
            answers = [getattr(row, "data", row).get("reward_extra_info", {}) for row in rows["extra_fields"]]
            self.tokens += sum(tag["seq_len"] for tag in batch.tags)
            metrics |= watched([key.split("_")[0] for key in batch.keys], scores, answers)
            metrics["generated/num_tokens"] = self.tokens
        return batch, metrics


def watched(groups: list[str], scores: list[float], answers: list[dict[str, Any]]) -> dict[str, float]:
    """The metrics of rollouts, given the group and score of each and what the reward function said of it."""
    of: dict[str, list[float]] = defaultdict(list)
    for group, score in zip(groups, scores, strict=True):
        of[group].append(score)
    flat = sum(len(s) for s in of.values() if max(s) == min(s))
    values = {"generated/reward": sum(scores) / len(scores), "generated/frac_reward_zero_std": flat / len(scores)}
    for name, first in answers[0].items():
        if isinstance(first, (int, float)) and all(name in a for a in answers):
            values[f"generated/rewards/{name}/mean"] = sum(float(a[name]) for a in answers) / len(answers)
    return values
