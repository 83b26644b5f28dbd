"""Tasks of `reasoning-gym` (procedurally generated, with scorers) as rows and reward functions of TRL and verl.

    from rl_plugins.environments.reasoning_gym import rows
    data = datasets.Dataset.from_list(rows({"chain_sum": {"min_digits": 1}, "leg_counting": {}}, 300))

In TRL name the rewards: ``reward_funcs: [rl_plugins.environments.reasoning_gym.correct]``. In verl write
:func:`verl_rows` to a parquet file, set ``reward.custom_reward_function.path`` to
``pkg://rl_plugins.environments.reasoning_gym`` and its ``name`` to ``compute_score``. Needs the packages
`reasoning-gym` and `drawsvg`, the extra `real`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.environments.libraries import library

SYSTEM = "Reply with the answer only."
SOLVED = 0.999  # scores are floats; a full one is 1
SHORT, LONG = 12, 60  # characters, of `brief`


@functools.cache
def _dataset(task: str, seed: int, size: int, settings: str) -> Any:
    reasoning_gym = library("reasoning_gym", "real")
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **json.loads(settings))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(f"The task {task!r} of reasoning-gym with the settings {settings} failed: {error}") from error


def rows(
    tasks: Mapping[str, Mapping[str, Any]], size: int, *, system: str | None = SYSTEM, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows of a dataset, the tasks in turn.

    Args:
        tasks: names of tasks -> their settings, as `reasoning_gym.create_dataset` takes them.
        size: number of rows.
        system: system prompt; None: the chat begins with the question.
        seed: of the questions; one comes twice where a task has few.

    Returns:
        Rows with `prompt` (a chat), `task`, `entry` (JSON text, what the task's scorer reads), `answer`.

    Raises:
        ConfigError: reasoning-gym is missing, or has no such task or setting.
    """
    names, made = list(tasks), []
    each = -(-size // len(names))
    for i in range(size):
        name = names[i % len(names)]
        entry = _dataset(name, seed, each, json.dumps(dict(tasks[name])))[i // len(names)]
        chat = [{"role": "system", "content": system}] if system else []
        chat.append({"role": "user", "content": entry["question"].strip()})
        made.append(
            {"prompt": chat, "task": name, "entry": json.dumps(entry, default=str), "answer": str(entry["answer"])}
        )
    return made


def split(
    tasks: Mapping[str, Mapping[str, Any]], train: int, held_out: int, **options: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to train on and held-out rows. No question of one is in the other, so where a task has few questions there
    are fewer than `train`.

    Args:
        tasks, options: of :func:`rows`.

    Returns:
        At most `train` rows, and `held_out` rows.

    Raises:
        ConfigError: see :func:`rows`.
    """
    made = rows(tasks, held_out + train, **options)
    asked = {row["prompt"][-1]["content"] for row in made[:held_out]}
    return [row for row in made[held_out:] if row["prompt"][-1]["content"] not in asked], made[:held_out]


def verl_rows(rows: Sequence[Mapping[str, Any]], split: str = "train") -> list[dict[str, Any]]:
    """Rows of :func:`rows` in the columns that verl reads."""
    return [
        {
            "data_source": row["task"],
            "prompt": row["prompt"],
            "ability": row["task"],
            "reward_model": {"style": "rule", "ground_truth": row["answer"]},
            "extra_info": {"index": index, "split": split, "entry": row["entry"], "answer": row["answer"]},
        }
        for index, row in enumerate(rows)
    ]


def answer_of(text: str) -> str:
    """The answer that a completion gives: between `<answer>` tags, else what follows the last `=`, `:` or `is` of the
    last line, else the last line."""
    tagged = re.findall(r"<answer>(.*?)(?:</answer>|$)", text, re.DOTALL)
    if tagged:
        return str(tagged[-1]).strip()
    last = text.strip().splitlines()[-1:] or [""]
    return re.split(r"[=:]|\bis\b", last[0])[-1].strip().strip(".`*\"'")


def correct(
    completions: Sequence[Any], *, task: Sequence[str], entry: Sequence[str], answer: Sequence[str], **columns: Any
) -> list[float]:
    """The task's own scorer on :func:`answer_of`, in [0, 1]; many scorers give partial credit."""
    return [
        score(name, json.loads(text) | {"answer": right}, answer_of(_text(completion)))
        for completion, name, text, right in zip(completions, task, entry, answer, strict=True)
    ]


def solved(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 where :func:`correct` gives full marks, else 0."""
    return [float(value >= SOLVED) for value in correct(completions, **columns)]


def brief(completions: Sequence[Any], **columns: Any) -> list[float]:
    """1 for at most 12 characters, falling evenly to 0 at 60."""
    lengths = (len(_text(completion).strip()) for completion in completions)
    return [min(1.0, max(0.0, (LONG - length) / (LONG - SHORT))) for length in lengths]


def score(task: str, entry: Mapping[str, Any], answer: str) -> float:
    """The scorer of one task on one answer. Its settings do not matter: what it reads is in `entry`."""
    return float(_dataset(task, 0, 1, "{}").score_answer(answer, entry))


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: Mapping[str, Any],
    reward: str = "correct",
    **kwargs: Any,
) -> dict[str, float]:
    """The rewards of one completion, as `reward.custom_reward_function` of verl calls it.

    Args:
        data_source: name of the task.
        ground_truth: its answer.
        extra_info: of the row, with `entry`.
        reward: the one that is "score", `correct`, `solved` or `brief`; an option of verl,
            `reward.custom_reward_function.reward_kwargs.reward`.

    Returns:
        "score", "correct", "solved" and "brief".
    """
    value = score(data_source, json.loads(extra_info["entry"]) | {"answer": ground_truth}, answer_of(solution_str))
    parts = {"correct": value, "solved": float(value >= SOLVED), "brief": brief([solution_str])[0]}
    return {"score": parts[reward], **parts}


def _text(completion: Any) -> str:
    return completion if isinstance(completion, str) else str(completion[-1]["content"])
