"""One generation batch: plan, samples, rewards, the driver's decision, and this rank's part of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.denoising import SamplePrompt
from rl_plugins.core.estimators import Scale, grpo_advantages
from rl_plugins.core.rollouts import PlanRow, weighted_reward
from rl_plugins.diffusion.capabilities import check_plan
from rl_plugins.diffusion.config import DiffusionConfig
from rl_plugins.diffusion.objective import Objective
from rl_plugins.diffusion.rewards import FlatRollout, PolicyEngine
from rl_plugins.diffusion.rows import LocalRow, Outline, outlines, rollouts_of
from rl_plugins.kit.row_sets import shuffled
from rl_plugins.runtime.decide import Decision, check_full, decide
from rl_plugins.runtime.idle import look_for_idle
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan, split_plan
from rl_plugins.runtime.ranks import Ranks, everywhere, on_driver, on_driver_for_each
from rl_plugins.runtime.rounds import Rounds, in_rounds
from rl_plugins.runtime.samples import RunningSamples, run_samples
from rl_plugins.runtime.stack import MethodStack


@dataclass(frozen=True)
class RankPart:
    """What the driver decided on one rank's rows, in their order; tokens flat, row by row.

    Args:
        trained: (rows,) bool.
        update: (rows,) optimizer step of the batch that trains each.
        group: (rows,). keep, advantages: (tokens,). old_logprobs: (tokens,) or None: those of the rollout.
        row_columns, token_columns: by name.
        num_rows, num_tokens: of each optimizer step, over all ranks.
        reward: (rows,) that was used.
    """

    trained: Tensor
    update: Tensor
    group: Tensor
    keep: Tensor
    advantages: Tensor
    old_logprobs: Tensor | None
    row_columns: Mapping[str, Tensor]
    token_columns: Mapping[str, Tensor]
    num_rows: tuple[int, ...]
    num_tokens: tuple[int, ...]
    reward: Tensor


@dataclass(frozen=True)
class Made:
    """A batch as it comes to the update: this rank's rows, its part of the decision, and on the driver what is logged.

    Args:
        ref_logprobs: of each row, if somebody needs them.
    """

    rows: Sequence[LocalRow]
    part: RankPart
    ref_logprobs: Sequence[Tensor] | None
    metrics: Mapping[str, float]


class BatchMaker:
    """Makes batches, the same decisions on every rank.

    Args:
        dataset: rows by number, each with its condition in "prompt".
        reference: log-densities of the reference of each row, if methods need them.
    """

    def __init__(
        self,
        stack: MethodStack,
        config: DiffusionConfig,
        ranks: Ranks,
        dataset: Sequence[Mapping[str, Any]],
        engine: PolicyEngine,
        objective: Objective,
        shape: tuple[int, ...],
        reference: Callable[[Sequence[LocalRow]], list[Tensor]] | None,
    ) -> None:
        self.stack, self.config, self.ranks, self.dataset = stack, config, ranks, dataset
        self.engine, self.objective, self.shape, self.reference = engine, objective, shape, reference
        self.program = stack.claims["rollout"][0] if stack.claims["rollout"] else FlatRollout()

    def proposal(self, batch: int) -> list[int]:
        """The prompts of a batch without methods: the next ones of an endless shuffling."""
        size, wanted = len(self.dataset), self.config.prompts_per_batch
        first, out = batch * wanted, list[int]()
        for epoch in range(first // size, (first + wanted - 1) // size + 1):
            order = shuffled([self.config.seed, 1, epoch], size)
            places = range(max(first - epoch * size, 0), min(first + wanted - epoch * size, size))
            out += [int(order[place]) for place in places]
        return out

    def columns(self, row: PlanRow) -> dict[str, Any]:
        """A dataset row, with what the plan changes in it."""
        stored = self.dataset[row.prompt_index] if row.prompt_index >= 0 else {}
        return {**stored, **(row.edit or {})}

    def make(self, version: int) -> Made:
        """The next batch.

        Args:
            version: published weights.
        """
        plan: list[PlanRow] = []
        rows: list[LocalRow] = []
        every: list[tuple[int, int, Outline]] = []  # rank, place among its rows, what it is
        rounds_of_batch: list[Rounds] = []  # on the driver only

        def more() -> tuple[PlanRow, ...]:
            if not rounds_of_batch:
                c = self.config
                proposal, size = self.proposal(self.stack.batch), len(self.dataset)
                first = first_plan(self.stack, proposal, c.group_size, c.batch_rows, size, self.dataset).rows
                rounds_of_batch.append(Rounds(self.stack, first, c.group_size, c.batch_rows, size))
                asked = first
            elif not in_rounds(self.stack):
                return ()
            else:
                group, reward = self._so_far(plan, every)
                asked = rounds_of_batch[0].more(group, reward)
            check_plan(asked)
            return asked

        while asked := on_driver(self.ranks, more):
            new = self._made(asked, len(plan))
            plan += asked
            told = everywhere(self.ranks, partial(self._outlines, new))
            counts = [sum(r == k for r, _, _ in every) for k in range(len(told))]
            every += [(k, counts[k] + i, o) for k, of in enumerate(told) for i, o in enumerate(of)]
            rows += new
        own = [o for k, _, o in every if k == self.ranks.process_index]
        logged: dict[str, float] = {}
        of_programs = everywhere(self.ranks, self.stack.metrics.take)
        decide_all = partial(self._decide, plan, every, version, of_programs, logged)
        part, self.stack.batch = on_driver_for_each(self.ranks, decide_all)
        ref = [o.ref_logprobs for o in own if o.ref_logprobs is not None] if self.reference else None
        return Made(rows, part, ref, logged)

    def _made(self, plan: Sequence[PlanRow], first: int) -> list[LocalRow]:
        """This rank's samples of a round, scored."""
        rank = self.ranks.process_index
        shares = split_plan(plan, self.ranks.num_processes)
        first += sum(len(share) for share in shares[:rank])
        found: list[LocalRow] = []

        def work() -> None:
            prompts = [self.prompt(p) for p in shares[rank]]
            programs = [RunningSamples(self.program, p) for p in prompts]
            with self.objective.sampling():
                run_samples(programs, self.engine)
            samples = [(i, s) for i, program in enumerate(programs) for s in program.samples]
            unscored = [(i, s) for i, s in samples if s.rewards is None]
            scored = iter(self.engine.score([(prompts[i], s) for i, s in unscored]))
            for i, s in samples:
                known = s if s.rewards is not None else s.scored(next(scored))
                found.append(LocalRow(first + i, prompts[i].condition, known, self.objective.tokens(known)))

        everywhere(self.ranks, work)
        return found

    def _outlines(self, rows: Sequence[LocalRow]) -> list[Outline]:
        return outlines(rows, self.reference(rows) if self.reference else None)

    def prompt(self, row: PlanRow) -> SamplePrompt:
        """What a program works on."""
        columns, policy = self.columns(row), self.engine.policy
        return SamplePrompt(
            condition=columns["prompt"],
            columns=columns,
            n=row.n + row.spare,
            steps=self.config.steps,
            sigmas=policy.grid(self.config.steps),
            shape=self.shape,
            payload=row.payload,
            batch=self.stack.batch,
            reward_names=self.engine.rewards.names,
            has_cheap=policy.make_cheap is not None,
            stochastic=self.objective.stochastic,
            seed=f"{self.stack.seed}|{self.program.name}|{row.group}",
        )

    def _so_far(self, plan: Sequence[PlanRow], every: Sequence[tuple[int, int, Outline]]) -> tuple[Tensor, Tensor]:
        in_order = [o for _, _, o in sorted(every, key=lambda x: (x[2].plan, x[1]))]
        names, weights = self.engine.rewards.names, self.engine.rewards.weights
        given = torch.tensor([[o.rewards.get(n, torch.nan) for n in names] for o in in_order], dtype=torch.float64)
        return torch.tensor([plan[o.plan].group for o in in_order]), weighted_reward(given, weights)

    # ---- on the driver

    def _decide(
        self,
        plan: Sequence[PlanRow],
        every: Sequence[tuple[int, int, Outline]],
        version: int,
        of_programs: Sequence[Any],
        logged: dict[str, float],
    ) -> list[tuple[RankPart, int]]:
        """Decides on all rows, groups whole and in the order of the plan, and cuts the decision into parts."""
        stack, c, rewards = self.stack, self.config, self.engine.rewards
        order = sorted(every, key=lambda x: (plan[x[2].plan].group, x[2].plan, x[1]))
        told = [o for _, _, o in order]
        rollouts, tokens = rollouts_of(stack, plan, told, rewards, self.columns, version)
        estimator = partial(grpo_advantages, scale=cast(Scale, c.scale_rewards))
        decision = decide(stack, rollouts, tokens, None, estimator, c.batch_rows)
        check_full(stack, decision, c.batch_rows)
        own = combine([*of_programs, stack.metrics.take()])
        look_for_idle(stack, decision, own)
        logged.update(_logged(decision, told), **own)
        update = self._updates(decision, stack.batch)
        owners = torch.tensor([k for k, _, _ in order], dtype=torch.int64)
        places = torch.tensor([i for _, i, _ in order], dtype=torch.int64)
        every_rank = range(self.ranks.num_processes)
        return [(_part_of(decision, update, c.updates_per_batch, owners == k, places), stack.batch) for k in every_rank]

    def _updates(self, decision: Decision, batch: int) -> Tensor:
        """(rows,) the optimizer step of each row: trained rows are shuffled and dealt."""
        trained = decision.trained.nonzero()[:, 0]
        rng = np.random.default_rng([self.config.seed, 2, batch])
        order = torch.from_numpy(rng.permutation(len(trained)))
        update = torch.zeros(len(decision.trained), dtype=torch.int64)
        update[trained[order]] = torch.arange(len(trained)) % self.config.updates_per_batch
        return update


def _part_of(d: Decision, update: Tensor, updates: int, mine: Tensor, places: Tensor) -> RankPart:
    """One rank's part of a decision, with its rows in the order in which the rank has them.

    Args:
        mine: (rows,) bool. places: (rows,) of each among the rows of its rank.
    """
    length = d.rollouts.length
    row_of = torch.repeat_interleave(torch.arange(len(length)), length)
    keep = d.trained[row_of] if d.keep_tokens is None else d.keep_tokens
    advantages = d.row_advantages[row_of] if d.advantages is None else d.advantages
    rows = mine.nonzero()[:, 0]
    rows = rows[torch.argsort(places[rows])]
    first = torch.cumsum(length, 0) - length
    spans = [torch.arange(int(first[r]), int(first[r] + length[r])) for r in rows]
    tokens = torch.cat(spans) if spans else torch.zeros(0, dtype=torch.int64)
    return RankPart(
        trained=d.trained[rows],
        update=update[rows],
        group=d.rollouts.group[rows],
        keep=keep[tokens],
        advantages=advantages[tokens].float(),
        old_logprobs=None if d.old_logprobs is None else d.old_logprobs[tokens],
        row_columns={k: v[rows].float() for k, v in d.row_columns.items()},
        token_columns={k: v[tokens].float() for k, v in d.token_columns.items()},
        num_rows=tuple(int((d.trained & (update == k)).sum()) for k in range(updates)),
        num_tokens=tuple(int((keep & (update[row_of] == k)).sum()) for k in range(updates)),
        reward=d.rollouts.reward[rows],
    )


def _logged(decision: Decision, rows: Sequence[Outline]) -> dict[str, float]:
    """Metrics of a batch."""
    rollouts = decision.rollouts
    inside = rollouts.subset(rollouts.kept)
    spread = inside.groups.rows(torch.nan_to_num(inside.groups.std(inside.reward)))
    trained = rollouts.length[decision.trained] if decision.keep_tokens is None else decision.keep_tokens
    out = {"reward": _mean(rollouts.reward), "reward_std": _mean(rollouts.groups.std(rollouts.reward))}
    for name, column in zip(rollouts.reward_names, rollouts.rewards.unbind(1), strict=True):
        out[f"rewards/{name}"] = _mean(column)
    return out | {
        "frac_reward_zero_std": float((spread == 0).double().mean()) if len(inside) else 0.0,
        "rl_plugins/rows_generated": float(len(rows)),
        "rl_plugins/rows_trained": float(decision.trained.sum()),
        "rl_plugins/transitions": float(rollouts.length.sum()),
        "rl_plugins/transitions_trained": float(trained.sum()),
    }


def _mean(x: Tensor) -> float:
    return float(torch.nanmean(x)) if len(x) else float("nan")
