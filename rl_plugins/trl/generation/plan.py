"""Rows that a plan asks for, all at once: TRL's own method generates them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.runtime.plan import check_length, check_rewards, check_versions, first_plan
from rl_plugins.runtime.ranks import on_driver
from rl_plugins.trl.generation.prompts import Prompts
from rl_plugins.trl.generation.work import Row, Work, dealt
from rl_plugins.trl.host import Trainer


def work_of_plan(trainer: Trainer, prompts: Prompts) -> Work:
    """The work of batches without rounds, programs and queue."""
    payload: list[Any] = []
    plan = on_driver(trainer.accelerator, lambda: without_payload(planned(trainer, prompts), payload))
    rows, size = rows_of(plan), trainer.num_generations
    regular = (
        len(rows) == trainer.args.generation_batch_size
        and all(p.n == size and not p.spare for p in plan)
        and len({p.group for p in plan}) == len(plan)
    )
    as_proposed = regular and all(p == PlanRow(q, p.group, size) for p, q in zip(plan, prompts.proposal, strict=True))
    rank = trainer.accelerator.process_index
    return Work(prompts, dealt(trainer, rows), rank, regular, as_proposed, payload)


def planned(trainer: Trainer, prompts: Prompts) -> tuple[PlanRow, ...]:
    """The first, or only, plan of a batch; on the driver."""
    stack, size, budget = trainer.methods, trainer.num_generations, trainer.args.generation_batch_size
    return checked(
        trainer, prompts, first_plan(stack, prompts.proposal, size, budget, prompts.size, prompts.dataset).rows
    )


def checked(trainer: Trainer, prompts: Prompts, rows: tuple[PlanRow, ...]) -> tuple[PlanRow, ...]:
    """Refuses what this run cannot generate."""
    generated, budget = sum(p.n + p.spare for p in rows), trainer.args.generation_batch_size
    special = [p for p in rows if p.given or p.prefix or p.max_tokens is not None]
    if special and (trainer.rollout_func is not None or trainer.tools):
        raise ConfigError(
            "The plan gives completions, prefixes or token limits, which cannot be combined with rollout_func, "
            "tools or environments: those make the completions themselves. Remove them or the method."
        )
    if prompts.has_images and (generated != budget or special):
        raise ConfigError(
            f"The plan generates {generated} completions for a batch of {budget} with images; rows "
            f"of image batches cannot be added or cut yet. Remove the method that changes the plan."
        )
    if not trainer.methods.claims["rollout"] and any(c.turns or c.prompt is not None for p in special for c in p.given):
        raise ConfigError(
            "The plan gives completions with turns or a prompt of their own, which only a method that plays agents "
            "(turn_control) can take here. Name one, or remove the method that plans them."
        )
    for p in special:
        check_length(p, trainer.max_completion_length)
        check_rewards(p, trainer.reward_func_names)
        check_versions(p, trainer.state.global_step)
    return rows


def rows_of(plan: Sequence[PlanRow]) -> list[Row]:
    """The rollouts of each plan row, spare ones included."""
    return [Row(p, i) for p in plan for i in range(p.n + p.spare)]


def without_payload(rows: Sequence[PlanRow], kept: list[Any]) -> tuple[PlanRow, ...]:
    """Payloads stay on the driver, one for each rollout; the rest of the plan travels to all ranks."""
    kept += [p.payload for p in rows for _ in range(p.n + p.spare)]
    return tuple(p.replace(payload=None) for p in rows)
