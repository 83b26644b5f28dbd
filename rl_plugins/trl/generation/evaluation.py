"""Evaluation in TRL with the hooks that methods declare for it (`in_eval`): edits of prompts, and rollout programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from rl_plugins.core.requests import Trajectory
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.runtime.plan import evaluation_plan, in_evaluation
from rl_plugins.runtime.ranks import gather, on_driver
from rl_plugins.trl.changes import changed
from rl_plugins.trl.generation.programs import make_rollouts, served
from rl_plugins.trl.generation.work import ProgramRow
from rl_plugins.trl.host import DatasetRow, Trainer


@contextlib.contextmanager
def evaluation_view(trainer: Trainer, inputs: list[DatasetRow]) -> Iterator[list[DatasetRow]]:
    """This rank's rows of an evaluation batch, edited, and their completions made by a program where a method wants
    that. TRL evaluates as always where none does."""
    planning, program = (in_evaluation(trainer.methods, hook) for hook in ("plan", "rollout"))
    if not planning and not program:
        yield inputs
        return
    counts = _prompts(inputs)
    plans = [PlanRow(-1, i, n, edit=dict(inputs[first])) for i, (first, n) in enumerate(counts)]
    if planning:
        plans = _planned(trainer, plans)
    rows = [dict(p.edit or {}) for p in plans]
    if not program:
        yield [dict(row) for row, p in zip(rows, plans, strict=True) for _ in range(p.n)]
        return
    made_of = make_rollouts(trainer, plans, rows, training=False)
    trainer.methods.metrics.take()  # of a training batch nobody makes here
    made: list[ProgramRow] = []
    out: list[DatasetRow] = []
    for p, row, (prompt, rollouts) in zip(plans, rows, made_of, strict=True):
        finals = [rollout[-1] for rollout in rollouts if rollout][: p.n]  # the row that ends a rollout
        finals += (finals[-1:] or [Trajectory(prompt.tokens)]) * (p.n - len(finals))
        made += [ProgramRow(p, p.group, k, 0, t) for k, t in enumerate(finals)]
        out += [{**row, **t.meta} for t in finals]
    names = dict.fromkeys(k for x in out for k in x)
    with changed(trainer, rollout_func=lambda prompts, host: served(made, prompts, host)):
        yield [{k: x.get(k) for k in names} for x in out]


def _prompts(inputs: list[DatasetRow]) -> list[tuple[int, int]]:
    """(first row, rows) of each prompt; TRL repeats a prompt for its completions."""
    found: list[tuple[int, int]] = []
    for i, x in enumerate(inputs):
        if found and inputs[found[-1][0]] == x:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((i, 1))
    return found


def _planned(trainer: Trainer, plans: list[PlanRow]) -> list[PlanRow]:
    """This rank's prompts, as the driver plans those of all ranks."""
    parts = gather(trainer.accelerator, plans)
    rows = [replace(p, group=i) for i, p in enumerate(p for part in parts for p in part)]
    everybody = on_driver(trainer.accelerator, lambda: evaluation_plan(trainer.methods, rows))
    start = sum(len(part) for part in parts[: trainer.accelerator.process_index])
    return everybody[start : start + len(plans)]
