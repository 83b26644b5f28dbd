"""The run of `rl-plugins demo` without a method: GDPO against plain GRPO on two rewards of different size.

Two reward functions on the tasks of sorting digits: `points`, 0 to 100, and `mark`, 0 or 1, for the mark that the task
asks for. Nobody has tuned their weights. GRPO adds them before it normalizes, so `mark` is lost in the spread of
`points`. GDPO normalizes each in its group first (arXiv 2601.05242). The control is GRPO with weights that bring both
to one size by hand: it has to learn what GDPO learns, else the gain would come from something else.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rl_plugins.lab.compare.plan import Variant
from rl_plugins.lab.demo import settings

REWARDS = ("points", "mark")
WEIGHTS, TUNED = (1.0, 1.0), (0.01, 1.0)
SECONDS = 35  # of a run, two at a time, measured
CONTROL = Variant("grpo_weighted", (), ("--reward_weights", *(f"{w:g}" for w in TUNED)))
VARIANTS = (Variant("grpo", ()), Variant("gdpo", ("gdpo",)), CONTROL)
METRICS = ["eval_rewards/mark/mean", "eval_rewards/points/mean", "rewards/mark/mean", "rewards/points/mean"]
LABELS = {
    "eval_rewards/mark/mean": "mark that was asked for, held out (share)",
    "eval_rewards/points/mean": "points, held out (0 to 100)",
    "rewards/mark/mean": "mark that was asked for, in training (share)",
    "rewards/points/mean": "points, in training (0 to 100)",
}
NOTES = [
    "TRL's GRPOTrainer, a policy of 78,272 parameters, tasks of sorting digits. Two rewards of different size: "
    "`points` (100 times the share of right digits) and `mark` (1 for the mark that the task asks for, else 0), with "
    "`reward_weights` of 1.",
    "grpo adds the rewards and normalizes the sum, so the small one is lost. gdpo normalizes each first. The control "
    "`grpo_weighted` is grpo with `reward_weights` 0.01 and 1: somebody has found the sizes by hand. On the bench "
    "gdpo was not ahead of rewards of equal size (`rl-plugins info gdpo`).",
]


def config(policy: Path, data: Path, long: bool) -> dict[str, Any]:
    """The config of every run; the variants differ in methods and reward weights only.

    Args:
        policy: folder of the warm-started policy.
        data: folder with train.jsonl and test.jsonl.
        long: more and larger steps.
    """
    changes: Mapping[str, Any] = {
        "reward_funcs": [f"rl_plugins.lab.demo.rewards.{name}" for name in REWARDS],
        "reward_weights": list(WEIGHTS),
        "num_generations": 8,
        "learning_rate": 6e-4,
        "scale_rewards": "group",
        "multi_objective_aggregation": "sum_then_normalize",  # TRL's default; its other value is much like GDPO
    }
    return {**settings.config(policy, data, ["gdpo"], long), **changes}
