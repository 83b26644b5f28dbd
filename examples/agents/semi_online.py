"""UI-S1 in TRL: recorded walks through the demo's grid world, and a policy that learns to act on its own history.

    python examples/agents/semi_online.py

A task is a recorded walk of an expert, 2 to 6 moves. The policy sees the task and the positions so far with its own
moves; a move that is not the expert's is replaced in the history, once per rollout (see `ui_s1_rollout`). The policy is
the demo's, warm-started on careless walks.

Arms, on the same kind of rollouts and budget:

    grpo on progress   TRL's GRPO; the reward of every row is its rollout's progress, the share of the steps before the
                       first mismatch
    grpo on matches    the same formula on whether the row's own step matches: UI-S1 without its step advantage
    ui_s1              matches, and returns that reach over the steps that follow
    ui_s1, gamma 0     without what follows

The filter of tasks is off: of 5 tasks a batch, few would stay.

Measured on held-out tasks on the policy's own history without patches, as in the paper (SOP): progress and success.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from common import arguments, compare, write_rows

from rl_plugins.lab.demo.environments import Grid
from rl_plugins.lab.demo.environments.policy import load_agent_policy

LONGEST, GROUP, TASKS = 6, 8, 5
ROLLOUT = {"max_steps": LONGEST, "step_tokens": 3, "write": "semi_online:write"}
UI_S1 = {"filter_by": "none", "rows_per_rollout": LONGEST}
ARMS: dict[str, Any] = {
    "grpo on progress": (["ui_s1_rollout"], {"ui_s1_rollout": ROLLOUT}),
    "grpo on matches": (["ui_s1_rollout", "ui_s1"], {"ui_s1_rollout": ROLLOUT, "ui_s1": {**UI_S1, "step_weight": 0.0}}),
    "ui_s1": (["ui_s1_rollout", "ui_s1"], {"ui_s1_rollout": ROLLOUT, "ui_s1": UI_S1}),
    "ui_s1, gamma 0": (["ui_s1_rollout", "ui_s1"], {"ui_s1_rollout": ROLLOUT, "ui_s1": {**UI_S1, "gamma": 0.0}}),
}


def write(messages: Any, history: Sequence[tuple[str, str]], observation: str) -> list[dict[str, str]]:
    """The conversation as the policy knows it: the first observation is the task itself."""
    said = []
    for seen, move in history:
        said += [{"role": "user", "content": seen}, {"role": "assistant", "content": move}]
    return [*said, {"role": "user", "content": observation}]


def progress(completions: Sequence[Any], progress: Sequence[float | None], **columns: Any) -> list[float]:
    """Share of the recorded steps before the first mismatch, which the rollout notes of its rows."""
    return [p or 0.0 for p in progress]


def success(completions: Sequence[Any], progress: Sequence[float | None], **columns: Any) -> list[float]:
    """1 where all steps match."""
    return [float(p == 1) for p in progress]


def recorded(row: dict[str, Any]) -> dict[str, Any]:
    """A dataset row with the expert's walk."""
    environment = Grid()
    observation, walk = environment.reset(row), []
    for move in Grid.expert(row):
        walk.append([observation.text, move])
        observation = environment.act(move)
    return {"prompt": row["prompt"], "expert": walk}


def tasks(split: str, n: int) -> list[dict[str, Any]]:
    return [recorded(row) for row in Grid.rows(3 * n, split=split) if Grid.optimal_steps(row) <= LONGEST][:n]


def main() -> None:
    args = arguments(__doc__.splitlines()[0], "compare-results/semi_online")
    test = tasks("held_out", 120)
    write_rows(args.out / "data", train=tasks("train", 300), test=test)
    config = {
        "model_name_or_path": str(load_agent_policy("Grid")),
        "dataset_name": str(args.out / "data"),
        "reward_funcs": ["semi_online.progress", "semi_online.success"],
        "reward_weights": [1.0, 0.0],
        "per_device_train_batch_size": LONGEST * GROUP * TASKS,
        "num_generations": GROUP,
        "max_completion_length": 4,
        "eval_strategy": "steps",
        "eval_steps": max(1, args.steps // 2),
        "eval_on_start": True,
        "per_device_eval_batch_size": len(test),
        "num_generations_eval": 1,
    }
    labels = {
        "eval_rewards/progress/mean": "progress, held out",
        "eval_rewards/success/mean": "success, held out",
        "ui_s1_rollout/steps": "steps per rollout, in training",
    }
    note = f"{TASKS} recorded tasks of at most {LONGEST} steps x {GROUP} rollouts a batch, {args.steps} steps."
    compare(args, config, ARMS, labels, note)


if __name__ == "__main__":
    main()
