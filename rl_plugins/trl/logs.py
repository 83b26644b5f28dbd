"""What TRL logs, put right where the methods made it untrue: the numbers shown are the numbers used."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.estimators import batch_std
from rl_plugins.runtime.decide import Decision
from rl_plugins.trl.host import Trainer


def make_room(trainer: Trainer, rows: int) -> None:
    """TRL's table of completions holds one batch; a plan may generate more."""

    def grown(d: Any) -> Any:
        return deque(d, maxlen=rows) if d.maxlen is not None and d.maxlen < rows else d

    logs = trainer._logs
    for name in ("images", "prompt", "completion", "advantages"):
        logs[name] = grown(logs[name])
    for name in ("rewards", "extra"):
        table = logs[name]
        for column in table:
            table[column] = grown(table[column])
        if rows > trainer.args.generation_batch_size:
            table.default_factory = lambda: deque(maxlen=rows)


def add(trainer: Trainer, values: Mapping[str, float]) -> None:
    """One more value of each; TRL logs the mean of those since the last log."""
    for name, value in values.items():
        trainer._metrics["train"][name].append(value)


def correct(
    trainer: Trainer,
    decision: Decision,
    rows: int,
    regular: bool,
    lengths: Tensor,
    own: Mapping[str, float],
) -> None:
    """Rewrites, in the main process, what TRL logged of this batch.

    Args:
        decision: on all rows.
        rows: that TRL saw, fillers included.
        regular: groups are those of TRL.
        lengths: (rows without fillers,) tokens as TRL counts them.
        own: what the methods logged.
    """
    metrics, logs = trainer._metrics["train"], trainer._logs
    rollouts = decision.rollouts
    real = len(rollouts)
    if rows > real:
        _drop_fillers(trainer, rows - real, lengths, rollouts.truncated)
    if decision.estimator != "host" or not decision.uniform or not bool(decision.stays.all()):
        _replace_last(logs["advantages"], decision.row_advantages.tolist())
    for name, reward in decision.rewarded_by.items():
        metrics[f"rewards/{name}/mean"].append(_mean(reward))
        metrics[f"rewards/{name}/std"].append(float(batch_std(reward)))
        logs["rewards"][name]  # a column of its own in the table of completions
    if decision.rewarded_by:
        metrics["reward"][-1], metrics["reward_std"][-1] = _mean(rollouts.reward), float(batch_std(rollouts.reward))
    extend_own_columns(trainer, real, {name: r.tolist() for name, r in decision.rewarded_by.items()})
    if not regular or decision.rewarded_by or not bool(rollouts.kept.all()):
        inside = rollouts.subset(rollouts.kept)
        spread = inside.groups.rows(torch.nan_to_num(inside.groups.std(inside.reward)))
        metrics["frac_reward_zero_std"][-1] = float((spread == 0).double().mean()) if len(inside) else 0.0
    if not regular or not bool(decision.stays.all()):
        metrics["rl_plugins/rows_generated"].append(float(real))
        metrics["rl_plugins/rows_trained"].append(float(decision.trained.sum()))
    add(trainer, own)


def extend_own_columns(trainer: Trainer, rows: int, values: Mapping[str, list[float]]) -> None:
    """Keeps the columns that `rewards` hooks made as long as TRL's own: their last `rows` entries are `values`, NaN for
    rows no hook saw (evaluation, a hook that changed nothing)."""
    logs, nan = trainer._logs, float("nan")
    length = len(logs["prompt"])
    for name, column in logs["rewards"].items():
        if name not in trainer.reward_func_names:
            entries = [*column, *values.get(name, [nan] * rows)][-length:]
            column.clear()
            column.extend([nan] * (length - len(entries)) + entries)


def _drop_fillers(trainer: Trainer, count: int, lengths: Tensor, truncated: Tensor) -> None:
    """Fillers are the last rows of the batch: out of the table and out of the length metrics."""
    metrics, logs = trainer._metrics["train"], trainer._logs
    tables = [
        logs["prompt"],
        logs["completion"],
        logs["advantages"],
        *logs["rewards"].values(),
        *logs["extra"].values(),
    ]
    for table in tables:
        for _ in range(count):
            if table:
                table.pop()
    ended = lengths[~truncated].double()
    values = {
        "mean_length": lengths.double().mean(),
        "min_length": lengths.min(),
        "max_length": lengths.max(),
        "clipped_ratio": truncated.double().mean(),
        "mean_terminated_length": ended.mean() if len(ended) else torch.zeros(()),
        "min_terminated_length": ended.min() if len(ended) else torch.zeros(()),
        "max_terminated_length": ended.max() if len(ended) else torch.zeros(()),
    }
    for name, value in values.items():
        metrics[f"completions/{name}"][-1] = float(value)


def _replace_last(table: Any, values: list[float]) -> None:
    for _ in range(min(len(values), len(table))):
        table.pop()
    table.extend(values)


def _mean(x: Tensor) -> float:
    return float(torch.nanmean(x))
