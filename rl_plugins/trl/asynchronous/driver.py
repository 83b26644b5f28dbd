"""The driver: stands on the main process between the queue and the batcher of TRL, and decides on complete groups."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.rollouts import PlanRow, Rollouts
from rl_plugins.runtime.decide import check_full, decide
from rl_plugins.runtime.idle import look_for_idle
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import check_length, check_rewards, check_versions, first_plan
from rl_plugins.runtime.staleness import staleness_metrics
from rl_plugins.trl import logs
from rl_plugins.trl.asynchronous.capabilities import rows_per_step
from rl_plugins.trl.asynchronous.samples import Now, QueueEntry, seen, with_decision


class LastSeen:
    """TRL's queue, which also keeps the sample it gave last: TRL's dataset hands on only parts of it."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.last = inner, None

    def get(self, *args: Any, **kwargs: Any) -> Any:
        self.last = self.inner.get(*args, **kwargs)
        return self.last

    def qsize(self) -> int:
        return int(self.inner.qsize())


class Deciding(torch.utils.data.IterableDataset[dict[str, Any]]):
    """TRL's dataset of samples, with the decisions of methods: as many rows as an optimizer step takes at a time.

    TRL itself throws away samples that are too old before they come here, so every group is decided on as a whole. Its
    dispatcher reads one micro-batch ahead: a batch is decided on before the optimizer step before it was made, except
    for the first.

    Args:
        trainer: with methods.
        dataset: TRL's, over `queue`.
        queue: remembers the sample behind each row.
    """

    def __init__(self, trainer: Any, dataset: Any, queue: LastSeen) -> None:
        self.trainer, self.dataset, self.queue = trainer, dataset, queue
        self.logged: dict[int, dict[str, float]] = {}  # batch -> what was logged of it, until it is trained
        self._waiting: QueueEntry | None = None  # the first row of a group that was seen too early

    def __iter__(self) -> Iterator[dict[str, Any]]:
        source = iter(self.dataset)
        groups = rows_per_step(self.trainer.args) // self.trainer.args.num_generations
        planned = self.trainer.methods.claimed("select_prompts", "plan")
        while True:
            self.trainer._methods_callback.batch_begins()
            if planned:
                entries = self._planned(source)
            else:
                entries = [e for _ in range(groups) for e in self._group(source)]
            yield from self._decided(entries)

    def _planned(self, source: Iterator[dict[str, Any]]) -> list[QueueEntry]:
        """What the methods plan, made by our worker, which generates when it is asked."""
        worker = self.trainer.rollout_worker
        worker.make(self._plan(worker.proposal()))
        return [self._next(source) for _ in range(worker.qsize())]

    def _plan(self, proposal: Sequence[int]) -> tuple[PlanRow, ...]:
        """The plan of the next optimizer step, from the prompts the worker would take.

        Raises:
            MethodError: see `first_plan`; a completion, prefix or version that cannot be.
            ConfigError: completions with turns or a prompt of their own.
        """
        t, data = self.trainer, self.trainer.train_dataset
        rows = first_plan(t.methods, proposal, t.args.num_generations, rows_per_step(t.args), len(data), data).rows
        for p in rows:
            if any(c.turns or c.prompt is not None for c in p.given):
                raise ConfigError(
                    "The plan gives completions with turns or a prompt of their own, and no method plays agents in "
                    "TRL's asynchronous trainer. Remove the method that plans them, or use rl_plugins.trl.GRPOTrainer."
                )
            check_length(p, t.args.max_completion_length)
            check_rewards(p, t.rollout_worker.reward_names)
            check_versions(p, t.state.global_step // t.args.weight_sync_steps)
        return rows

    def _group(self, source: Iterator[dict[str, Any]]) -> list[QueueEntry]:
        """The next complete group. One that lacks samples is left out: TRL threw them away, or its worker lost them."""
        t = self.trainer
        while True:
            found = [self._waiting or self._next(source)]
            self._waiting = None
            while len(found) < t.args.num_generations:
                entry = self._next(source)
                if entry.sample.group_id != found[0].sample.group_id:
                    self._waiting = entry
                    break
                found.append(entry)
            if len(found) == t.args.num_generations:
                return found
            logs.add(t, {"rl_plugins/incomplete_groups_total": 1.0})
            t.methods.warn_once(
                f"A group of TRL's queue has {len(found)} samples instead of num_generations="
                f"{t.args.num_generations}; it is left out, and so are later ones. The metric "
                f"rl_plugins/incomplete_groups_total counts them."
            )

    def _next(self, source: Iterator[dict[str, Any]]) -> QueueEntry:
        row = next(source)
        sample: Any = self.queue.last
        return QueueEntry(sample, row, self.trainer.prompt_index_of(sample))

    def _decided(self, entries: list[QueueEntry]) -> list[dict[str, Any]]:
        t = self.trainer
        stack = t.methods
        now = Now(t.model_version, t.state.global_step, stack.batch, t.args.weight_sync_steps)
        rollouts, tokens = seen(entries, stack, now, t.eos_token_ids, t)
        theirs = torch.tensor([e.sample.advantage for e in entries], dtype=torch.float64)
        size = rows_per_step(t.args)
        decision = decide(stack, rollouts, tokens, theirs, host_advantages, size)
        check_full(stack, decision, size)
        trained = decision.rollouts.subset(decision.trained)
        logged = combine([stack.metrics.take()])
        logged |= staleness_metrics(trained.current_version - trained.newest_version, trained.staleness)
        look_for_idle(stack, decision, logged)
        logged["rl_plugins/rows_trained"] = float(decision.trained.sum())
        if len(entries) != size:
            logged["rl_plugins/rows_generated"] = float(len(entries))
        self.logged[rollouts.batch] = logged
        return with_decision(entries, decision, now, size)


def host_advantages(rollouts: Rollouts) -> Tensor:
    """(rows,) as TRL's asynchronous worker makes them: (r - mean) / (population deviation + 1e-8); 0 without a
    reward."""
    centered, std = rollouts.groups.center_and_std(rollouts.reward, ddof=0)
    return (centered / rollouts.groups.rows(std + 1e-8)).nan_to_num(nan=0.0)
