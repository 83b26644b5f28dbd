"""One generation batch in TRL: plan, generate what the plan says, hand the rows to the driver, apply its decision.

TRL's own `_generate_and_score_completions` does all the work it always does (tokenizing, generating, log-probs,
rewards, logging). The adapter decides which rows it sees, and afterwards changes the batch it returns. While it runs,
`batch_phase` of the trainer is what the batch has become so far:

    Work  --_generate-->  GeneratedWork  --_calculate_rewards-->  ScoredWork  --decided_by_driver-->  DecidedWork
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins.core.estimators import gdpo_advantages, grpo_advantages
from rl_plugins.core.rollouts import Rollouts
from rl_plugins.runtime.decide import Decision, Selection, check_full, decide
from rl_plugins.runtime.idle import look_for_idle
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.ranks import gather, on_driver_for_each, to_driver
from rl_plugins.runtime.rounds import in_rounds
from rl_plugins.runtime.staleness import staleness_metrics
from rl_plugins.trl import logs
from rl_plugins.trl.generation.columns import columns_wanted, with_columns
from rl_plugins.trl.generation.decided import LocalDecision, apply_decision, local_decisions
from rl_plugins.trl.generation.plan import work_of_plan
from rl_plugins.trl.generation.programs import work_of_programs
from rl_plugins.trl.generation.prompts import PROMPT_INDEX, Prompts, strip
from rl_plugins.trl.generation.queue import work_of_queue
from rl_plugins.trl.generation.rounds import work_of_rounds
from rl_plugins.trl.generation.rows import Inside, collect, rollouts_of
from rl_plugins.trl.generation.serving import host_view
from rl_plugins.trl.generation.teacher import select_for_teacher, teacher_logprobs
from rl_plugins.trl.generation.work import ScoredWork, Work, flat
from rl_plugins.trl.host import NEWEST_VERSION, PUBLISHED, VERSION, VERSIONS, DatasetRow, HostBatch, Trainer
from rl_plugins.trl.loss.updates import with_rows


@dataclass(frozen=True)
class DriverDecision:
    """The decision on the rows of all ranks, the tokens of each row as TRL counts them, and what the methods logged."""

    decision: Decision
    lengths: Tensor
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class DecidedWork(ScoredWork):
    """What became of this rank's rows, fillers left out.

    Args:
        local: the decision on them.
        driver: on the driver only.
        inside: where tokens are that may carry a gradient.
        token_versions: (rows, time) published weights that made each token; None: the present ones.
        version, newest_version: (rows,) the oldest and the newest of them.
    """

    local: LocalDecision
    driver: DriverDecision | None
    inside: Inside
    token_versions: Tensor | None
    version: Tensor
    newest_version: Tensor

    @property
    def rows_trained(self) -> int:
        """Of all ranks, on the driver; 0 elsewhere."""
        return 0 if self.driver is None else int(self.driver.decision.trained.sum())

    def advantages(self, like: Tensor) -> Tensor:
        """(rows of all ranks,) to use. Those of other ranks are known, and logged, by the driver alone; 0 elsewhere."""
        used, size = torch.zeros_like(like), len(self.work.mine)
        if self.driver is not None:
            used[: len(self.driver.decision.rollouts)] = self.driver.decision.row_advantages.to(used)
        else:
            used[self.work.rank * size : (self.work.rank + 1) * size] = self.local.row_advantages.to(used)
        return used


def make_batch(
    trainer: Trainer, inputs: list[DatasetRow], host: Callable[[list[DatasetRow]], HostBatch]
) -> tuple[HostBatch, DecidedWork]:
    """TRL's batch with the decision of the driver applied.

    Args:
        inputs: this rank's rows of the dataloader, every prompt repeated `num_generations` times.
        host: TRL's own `_generate_and_score_completions`.
    """
    proposed = strip(inputs)
    numbers = flat(gather(trainer.accelerator, [int(x.get(PROMPT_INDEX, -1)) for x in inputs]))
    size = trainer.num_generations
    prompts = Prompts(trainer.train_dataset, numbers[::size], proposed, trainer.accelerator, size)
    with host_view(trainer, work_of(trainer, prompts), proposed) as rows:
        out = host(rows)
        phase: ScoredWork = trainer.batch_phase
    if not isinstance(phase, DecidedWork):
        out, columns = with_columns(trainer, phase, out)
        selection = None
        if "teacher_logprobs" in columns_wanted(trainer.methods):
            selection, teacher = select_for_teacher(trainer, phase, out["advantages"])
            columns["teacher_logprobs"] = teacher_logprobs(trainer, out, teacher)
        phase = decided_by_driver(trainer, phase, out["advantages"], columns, selection)
    return finish(trainer, phase, out), phase


def work_of(trainer: Trainer, prompts: Prompts) -> Work:
    """The rows of every rank; those of the queue, of programs and of rounds are made here."""
    stack = trainer.methods
    if stack.claims["admit"]:
        return work_of_queue(trainer, prompts)
    if stack.claims["rollout"]:
        return work_of_programs(trainer, prompts)
    return work_of_rounds(trainer, prompts) if in_rounds(stack) else work_of_plan(trainer, prompts)


def decided_in_host(trainer: Trainer, scored: ScoredWork, advantages: Tensor) -> DecidedWork:
    """Decides while TRL's own method runs, without columns.

    Args:
        advantages: (rows of all ranks,) TRL's own.
    """
    start, size = scored.work.rank * len(scored.work.mine), len(scored.work.mine)
    return decided_by_driver(trainer, scored, advantages[start : start + size], {})


def decided_by_driver(
    trainer: Trainer,
    scored: ScoredWork,
    host_advantages: Tensor,
    columns: Mapping[str, Tensor],
    selection: Selection | None = None,
) -> DecidedWork:
    """The driver gets every rank's rows and decides; each rank gets its part of the decision.

    Args:
        host_advantages: (local rows,) TRL's own.
        columns: signal -> (rows, time).
        selection: on the driver, where a teacher came before this.
    """
    stack, work, budget = trainer.methods, scored.work, trainer.args.generation_batch_size
    local, inside, versions = collect(trainer, scored, host_advantages, columns)
    parts = to_driver(trainer.accelerator, local)
    of_programs = gather(trainer.accelerator, stack.metrics.take()) if work.by_program else []
    on_driver: list[DriverDecision] = []

    def run() -> list[tuple[LocalDecision, int]]:
        seen = rollouts_of(trainer, work, scored.rewards, parts)
        regular = seen.advantages if work.regular else None
        estimator = functools.partial(host_estimator, trainer)
        decision = decide(stack, seen.rollouts, seen.tokens, regular, estimator, budget, selection)
        check_full(stack, decision, budget)
        sizes = [len(r) for r in work.rows]
        read = not trainer.tools and not work.by_program  # TRL then counts every token of a completion
        lengths = seen.completion_length if read else decision.rollouts.length
        logged = combine([*of_programs, stack.metrics.take()]) | _staleness_of(decision)
        look_for_idle(stack, decision, logged)
        on_driver.append(DriverDecision(decision, lengths, logged))
        return [(part, stack.batch) for part in local_decisions(decision, sizes, budget)]

    mine, stack.batch = on_driver_for_each(trainer.accelerator, run)
    return DecidedWork(
        work,
        scored.rows,
        scored.rewards,
        scored.step_rewards,
        local=mine,
        driver=on_driver[0] if on_driver else None,
        inside=inside,
        token_versions=versions,
        version=local.version,
        newest_version=local.newest_version,
    )


def host_estimator(trainer: Trainer, rollouts: Rollouts) -> Tensor:
    """TRL's estimator for groups of any size."""
    if trainer.multi_objective_aggregation == "normalize_then_sum":
        return gdpo_advantages(rollouts.rewards, rollouts.reward_weights, rollouts.groups)
    return grpo_advantages(rollouts, trainer.scale_rewards)


def _staleness_of(decision: Decision) -> dict[str, float]:
    """Metrics of the rows that are trained."""
    rows = decision.rollouts.subset(decision.trained)
    return staleness_metrics(rows.current_version - rows.newest_version, rows.staleness)


def finish(trainer: Trainer, batch: DecidedWork, out: HostBatch) -> HostBatch:
    """TRL's batch, and what TRL logged of it, with the decision in them."""
    work, of_all = batch.work, batch.driver
    if of_all is not None:
        logs.correct(trainer, of_all.decision, len(work.flat), work.regular, of_all.lengths, of_all.metrics)
    out = _with_versions(trainer, batch, out)
    if trainer.updates_seen is not None and trainer.updates_seen.wants_ratios:
        first = sum(r.plan is not None for part in work.rows[: work.rank] for r in part)
        out = with_rows(out, len(batch.inside.length), first)
    return apply_decision(trainer, out, batch.inside, batch.local, trainer.args.generation_batch_size)


def _with_versions(trainer: Trainer, batch: DecidedWork, out: HostBatch) -> HostBatch:
    """TRL's batch with the versions that hooks in the update see."""
    stack, now, ids = trainer.methods, trainer.state.global_step, out["completion_ids"]
    if not stack.claimed("policy_loss", "regularize", "before_update"):
        return out
    new = {PUBLISHED: torch.tensor(now)}  # stays on the CPU, where every micro-batch reads it
    if stack.claims["before_update"]:
        for name, values in ((VERSION, batch.version), (NEWEST_VERSION, batch.newest_version)):
            full = torch.full((len(ids),), now)
            full[: len(values)] = values
            new[name] = full.to(ids.device)
    if stack.in_loss("token_versions"):
        full, versions = torch.full(tuple(ids.shape), now), batch.token_versions
        if versions is not None:
            full[: versions.shape[0], : versions.shape[1]] = versions
        new[VERSIONS] = full.to(ids.device)
    return {**out, **new}
