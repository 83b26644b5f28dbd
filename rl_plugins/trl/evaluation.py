"""Evaluation in TRL with the hooks that methods declare for it (`in_eval`): edits of prompts, and rollout programs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace

from rl_plugins.errors import MethodError
from rl_plugins.method import Method
from rl_plugins.requests import Trajectory
from rl_plugins.rollouts import Plan, PlanRow
from rl_plugins.trl.changes import changed
from rl_plugins.trl.host import DatasetRow, Trainer
from rl_plugins.trl.programs import ProgramRow, served, start_programs
from rl_plugins.trl.ranks import gather, on_driver


@contextlib.contextmanager
def evaluation_view(trainer: Trainer, inputs: list[DatasetRow]) -> Iterator[list[DatasetRow]]:
    """This rank's rows of an evaluation batch, edited, and their completions made by a program where a method wants
    that. TRL evaluates as always where none does."""
    planning, program = acting(trainer, "plan"), acting(trainer, "rollout")
    if not planning and not program:
        yield inputs
        return
    counts = _prompts(inputs)
    plans = [PlanRow(-1, i, n, edit=dict(inputs[first])) for i, (first, n) in enumerate(counts)]
    for m in planning:
        plans = _planned(trainer, m, plans)
    rows = [dict(p.edit or {}) for p in plans]
    if not program:
        yield [dict(row) for row, p in zip(rows, plans, strict=True) for _ in range(p.n)]
        return
    programs = start_programs(trainer, plans, rows, training=False)
    trainer.methods.metrics.take()  # of a training batch nobody makes here
    made: list[ProgramRow] = []
    out: list[DatasetRow] = []
    for p, row, running in zip(plans, rows, programs, strict=True):
        finals = [rollout[-1] for rollout in running.rows or [] if rollout][: p.n]  # the row that ends a rollout
        finals += (finals[-1:] or [Trajectory(running.prompt.tokens)]) * (p.n - len(finals))
        made += [ProgramRow(p, p.group, k, 0, t) for k, t in enumerate(finals)]
        out += [{**row, **t.meta} for t in finals]
    names = dict.fromkeys(k for x in out for k in x)
    with changed(trainer, rollout_func=lambda prompts, host: served(made, prompts, host)):
        yield [{k: x.get(k) for k in names} for x in out]


def acting(trainer: Trainer, hook: str) -> list[Method]:
    """Methods whose `hook` acts in evaluation, too."""
    return [m for m in trainer.methods.claims[hook] if hook in m.in_eval]


def _prompts(inputs: list[DatasetRow]) -> list[tuple[int, int]]:
    """(first row, rows) of each prompt; TRL repeats a prompt for its completions."""
    found: list[tuple[int, int]] = []
    for i, x in enumerate(inputs):
        if found and inputs[found[-1][0]] == x:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((i, 1))
    return found


def _planned(trainer: Trainer, method: Method, plans: list[PlanRow]) -> list[PlanRow]:
    """The plan of the evaluation's prompts: edits and payloads; their number stays."""
    accelerator, stack = trainer.accelerator, trainer.methods
    parts = gather(accelerator, plans)

    def decide() -> list[PlanRow]:
        rows = [p for part in parts for p in part]
        numbered = tuple(replace(p, group=i) for i, p in enumerate(rows))
        size = max((p.n for p in numbered), default=1)
        plan = Plan(numbered, size, sum(p.n for p in numbered), batch=stack.batch)
        new = stack.call("plan", method, plan)
        result = list(new.rows if new is not None else numbered)
        if [(p.group, p.n + p.spare) for p in result] != [(p.group, p.n) for p in numbered]:
            raise MethodError(
                f"Method `{method.name}` changes how many rollouts the prompts of an evaluation get; in evaluation a "
                f"plan may edit prompts and attach payloads, nothing else."
            )
        return [replace(p, edit={**(old.edit or {}), **(p.edit or {})}) for old, p in zip(rows, result, strict=True)]

    everybody = on_driver(accelerator, decide)
    start = sum(len(part) for part in parts[: accelerator.process_index])
    return everybody[start : start + len(plans)]
