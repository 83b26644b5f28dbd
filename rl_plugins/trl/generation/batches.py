"""One generation batch in TRL: plan, generate what the plan says, hand the rows to the driver, apply its decision.

`GenerationBatch` lives while TRL's own `_generate_and_score_completions` runs. That method does all the work it always
does (tokenizing, generating, log-probs, rewards, logging); the adapter decides which rows it sees, and afterwards
changes the batch it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.estimators import gdpo_advantages, grpo_advantages
from rl_plugins.core.rollouts import Completion, PlanRow, Rollouts, weighted_reward
from rl_plugins.runtime.decide import Decision, check_full, decide
from rl_plugins.runtime.idle import look_for_idle
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import check_length, check_rewards, check_versions
from rl_plugins.runtime.ranks import deal, gather, on_driver, on_driver_for_each, to_driver, to_owners
from rl_plugins.runtime.rounds import Rounds, in_rounds
from rl_plugins.runtime.staleness import staleness_metrics
from rl_plugins.trl import logs
from rl_plugins.trl.capabilities import first_plan_of, known_of
from rl_plugins.trl.changes import changed, head_output
from rl_plugins.trl.generation.decided import LocalDecision, apply_decision, local_decisions
from rl_plugins.trl.generation.programs import ProgramRow, run_programs, served
from rl_plugins.trl.generation.prompts import PROMPT_INDEX, Prompts, strip
from rl_plugins.trl.generation.queue import run_queue
from rl_plugins.trl.generation.rows import FILLER, Row, Work, collect, flat, rollouts_of
from rl_plugins.trl.host import (
    NEWEST_VERSION,
    PUBLISHED,
    VERSION,
    VERSIONS,
    DatasetRow,
    HostBatch,
    HostRows,
    Score,
    SingleTurn,
    Trainer,
    model_input,
    more_model_input,
)
from rl_plugins.trl.loss.updates import with_rows

Made: TypeAlias = tuple[Completion, dict[str, Any]]  # a completion, and what reward functions added to its table


@dataclass(frozen=True)
class RoundRow:
    """A row of an earlier round, with its rewards; its completion is with the rank that made it, and empty here."""

    row: Row
    group: int
    reward: list[float]


@dataclass(frozen=True)
class RankDecision:
    """What the driver decided. mine: of this rank. The rest is on the driver only: the decision on all rows, the
    tokens of each as TRL counts them, what the methods logged."""

    mine: LocalDecision
    decision: Decision | None = None
    lengths: Tensor | None = None
    metrics: dict[str, float] | None = None


class GenerationBatch:
    """One generation batch of one rank.

    Args:
        trainer: the trainer.
        inputs: this rank's rows of the dataloader, every prompt repeated `num_generations` times.

    Attributes:
        work: what is generated; of the current round while there are rounds.
        generated: what TRL made of it.
        rewards: (rows of all ranks, functions), NaN for fillers.
        inside: (rows without fillers, time) bool, where tokens are that may carry a gradient.
        versions: (rows without fillers, time) published weights that made each token; None: the present ones.
        rows_version: (rows without fillers,) each, the oldest and the newest of them.
        decided: what became of it.
    """

    def __init__(self, trainer: Trainer, inputs: list[DatasetRow]) -> None:
        self.trainer, self.stack, self.accelerator = trainer, trainer.methods, trainer.accelerator
        self.group_size = trainer.num_generations
        self.batch_rows: int = trainer.args.generation_batch_size
        self.programs = self.stack.claimed("rollout", "admit")  # rows are made before TRL's own method runs
        self.loader_rows = strip(inputs)
        proposal = flat(gather(self.accelerator, [int(x.get(PROMPT_INDEX, -1)) for x in inputs]))[:: self.group_size]
        self.prompts = Prompts(trainer.train_dataset, proposal, self.loader_rows, self.accelerator, self.group_size)
        known = known_of(trainer)
        self.known = known if self.prompts.numbered else replace(known, size=None)
        self.serving = False  # `_generate_single_turn` serves the plan's rows the first time it is called
        self.work = Work()
        self.generated: HostRows | None = None
        self.rewards: Tensor | None = None
        self.inside: Tensor | None = None
        self.versions: Tensor | None = None
        self.rows_version: tuple[Tensor, Tensor] | None = None
        self.decided: RankDecision | None = None

    @property
    def mine(self) -> list[Row]:
        """This rank's rows."""
        return self.work.rows[self.accelerator.process_index]

    @property
    def rows_trained(self) -> int:
        """Of all ranks, on the driver; 0 elsewhere."""
        decision = self.decided.decision if self.decided is not None else None
        return 0 if decision is None else int(decision.trained.sum())

    # ---- what is generated

    def plan(self) -> None:
        """Decides the rows of every rank; with rounds, they are generated and scored here."""
        if self.stack.claims["admit"]:
            self.work = self._work_of_programs(run_queue(self.trainer, self.prompts))
        elif self.programs:
            plan = on_driver(self.accelerator, self._first_plan)
            self.work = self._work_of_programs(run_programs(self.trainer, plan, self.prompts.row))
        elif in_rounds(self.stack):
            self.work = self._work_of_rounds()
        else:
            self.work = self._work_of_plan()

    def _first_plan(self) -> tuple[PlanRow, ...]:
        return self._checked(first_plan_of(self.stack, self.known, self.prompts.proposal).rows)

    def _dealt(self, rows: Sequence[Row]) -> list[list[Row]]:
        ranks = self.accelerator.num_processes
        return deal(rows, ranks, self.batch_rows // ranks, FILLER)

    def _work_of_plan(self) -> Work:
        payload: list[Any] = []
        plan = on_driver(self.accelerator, lambda: _without_payload(self._first_plan(), payload))
        rows = [Row(p, i) for p in plan for i in range(p.n + p.spare)]
        regular = (
            len(rows) == self.batch_rows
            and all(p.n == self.group_size and not p.spare for p in plan)
            and len({p.group for p in plan}) == len(plan)
        )
        as_proposed = regular and all(
            p == PlanRow(q, p.group, self.group_size) for p, q in zip(plan, self.prompts.proposal, strict=True)
        )
        return Work(self._dealt(rows), regular, as_proposed, payload)

    def _work_of_programs(self, made: Sequence[ProgramRow]) -> Work:
        """Rows that exist already; TRL's own method gets them instead of generating."""
        rows = [Row(m.plan, m.rollout, made=m) for m in made]
        return Work(self._dealt(rows), payload=[m.plan.payload for m in made])

    def _checked(self, rows: tuple[PlanRow, ...]) -> tuple[PlanRow, ...]:
        """Refuses what this run cannot generate."""
        generated = sum(p.n + p.spare for p in rows)
        special = [p for p in rows if p.given or p.prefix or p.max_tokens is not None]
        if special and (self.known.rollout_func or self.known.tools):
            raise ConfigError(
                "The plan gives completions, prefixes or token limits, which cannot be combined with rollout_func, "
                "tools or environments: those make the completions themselves. Remove them or the method."
            )
        if self.prompts.has_images and (generated != self.batch_rows or special):
            raise ConfigError(
                f"The plan generates {generated} completions for a batch of {self.batch_rows} with images; rows "
                f"of image batches cannot be added or cut yet. Remove the method that changes the plan."
            )
        if not self.programs and any(c.turns or c.prompt is not None for p in special for c in p.given):
            raise ConfigError(
                "The plan gives completions with turns or a prompt of their own, which only a method that plays agents "
                "(turn_control) can take here. Name one, or remove the method that plans them."
            )
        for p in special:
            check_length(p, self.trainer.max_completion_length)
            check_rewards(p, self.trainer.reward_func_names)
            check_versions(p, self.trainer.state.global_step)
        return rows

    def _work_of_rounds(self) -> Work:
        """Generates and scores round by round until no method asks for more; TRL is then served from what is there."""
        made: list[RoundRow] = []
        own: dict[int, Made] = {}  # this rank's, by their places in `made`
        rounds_of_batch: list[Rounds] = []  # on the driver only, as the payloads are
        payload: list[Any] = []
        weights = self.trainer.reward_weights.double().cpu()

        def more() -> tuple[PlanRow, ...]:
            if not rounds_of_batch:
                rows = self._first_plan()
                rounds_of_batch.append(Rounds(self.stack, rows, self.group_size, self.batch_rows, self.known.size))
            else:
                group = torch.tensor([m.group for m in made])
                reward = weighted_reward(torch.tensor([m.reward for m in made]).double(), weights)
                rows = self._checked(rounds_of_batch[0].more(group, reward))
            return _without_payload(rows, payload)

        while plan := on_driver(self.accelerator, more):
            new, mine = self._round([Row(p, i) for p in plan for i in range(p.n + p.spare)])
            own |= {len(made) + i: x for i, x in mine.items()}
            made += new
        order = sorted(range(len(made)), key=lambda i: made[i].group)  # groups whole, in them the order of the rounds
        made, payload = [made[i] for i in order], [payload[i] for i in order] if payload else []
        rows = self._dealt([m.row for m in made])
        rank, each, place = self.accelerator.process_index, len(rows[0]), {i: k for k, i in enumerate(order)}
        own = to_owners(self.accelerator, {place[i]: x for i, x in own.items()}, lambda k: k // each)
        here = [own.get(k) for k in range(rank * each, (rank + 1) * each)]  # of fillers None
        rows[rank] = [r if x is None else replace(r, done=x[0]) for r, x in zip(rows[rank], here, strict=True)]
        names = dict.fromkeys(flat(gather(self.accelerator, [*{n: 0 for _, x in own.values() for n in x}])))
        extra = {n: [None if x is None else x[1].get(n) for x in here] for n in names}
        rewards = torch.full((sum(map(len, rows)), len(self.trainer.reward_funcs)), torch.nan)
        rewards[: len(made)] = torch.tensor([m.reward for m in made])
        device = self.accelerator.device
        return Work(rows, payload=payload, rewards=rewards.to(device), extra=extra)

    def _round(self, rows: list[Row]) -> tuple[list[RoundRow], dict[int, Made]]:
        """One round on all ranks; and by their places what this rank made of it. TRL's counters and metrics are put
        back, because TRL counts these rows again when it is served with them."""
        t, ranks = self.trainer, self.accelerator.num_processes
        self.work = Work(deal(rows, ranks, 1, FILLER))
        seen, metrics = t.state.num_input_tokens_seen, {k: list(v) for k, v in t._metrics["train"].items()}
        inputs = self._inputs()
        self.serving = True
        prompts = [x["prompt"] for x in inputs]
        new = HostRows.of(t._generate(prompts))
        rewards = t._calculate_rewards(inputs, prompts, new.completions, new.ids).double().tolist()
        t.state.num_input_tokens_seen = seen
        t._metrics["train"].clear()
        t._metrics["train"].update(metrics)
        extra = [{k: v[i] for k, v in t._pending_extra_logs.items() if i < len(v)} for i in range(len(inputs))]
        t._pending_extra_logs.clear()
        logprobs: list[Any] = new.logprobs or [None] * len(inputs)
        local = [
            (row.given or Completion(tuple(c), None if p is None else tuple(p)), e)
            for row, c, p, e in zip(self.mine, new.ids, logprobs, extra, strict=True)
        ]
        start = len(inputs) * self.accelerator.process_index
        found = [
            RoundRow(replace(row, done=Completion(())), row.plan.group, reward)
            for row, reward in zip(self.work.flat, rewards, strict=True)
            if row.plan is not None
        ]
        return found, {start + k: x for k, x in enumerate(local) if start + k < len(found)}

    # ---- while TRL's own method runs

    @contextlib.contextmanager
    def host_view(self) -> Iterator[list[DatasetRow]]:
        """This rank's inputs, with TRL's settings bent for as long as its own method runs on them."""
        t, work = self.trainer, self.work
        logs.make_room(t, len(work.flat))
        if work.rewards is not None:
            self._restore_extra_columns()
        bent: dict[str, Any] = {} if work.regular else {"num_generations": 1}  # other groups mean nothing to TRL
        if self.programs:  # what the programs made, in the place TRL has for it
            made = [r.made for r in self.mine]
            bent["rollout_func"] = lambda prompts, trainer: served(made, prompts, trainer)
        self.serving, self.generated = not self.programs, None
        try:
            with changed(t, **bent):
                yield self.loader_rows if work.as_proposed else self._inputs()
        finally:
            self.serving = False

    def _restore_extra_columns(self) -> None:
        for name, values in self.work.extra.items():
            self.trainer._pending_extra_logs[name].extend(values)

    def _inputs(self) -> list[DatasetRow]:
        anything = next(r.plan for r in self.work.flat if r.plan is not None)
        inputs = [self.prompts.row(r.plan or anything) for r in self.mine]
        if self.programs:  # what a program notes of a row is a column for reward functions
            names = dict.fromkeys(k for r in self.work.flat if r.made for k in r.made.trajectory.meta)
            for row, x in zip(self.mine, inputs, strict=True):
                x |= {k: (row.made.trajectory.meta if row.made else {}).get(k, x.get(k)) for k in names}
        return inputs

    def generate(
        self, host: SingleTurn, prompt_ids: list[list[int]], images: Any, fields: dict[str, Any], num_generations: int
    ) -> tuple[list[list[int]], Any]:
        """Serves TRL's request for one completion per row: given ones as they are, the others from the engine."""
        self.serving = False
        rows, eos = self.mine, self.trainer.eos_token_ids[0]
        if all(  # of all ranks: they must make the same request
            r.plan is not None and r.given is None and not r.plan.prefix and r.plan.max_tokens is None
            for r in self.work.flat
        ):
            # a vLLM server is asked for `each` completions of every each-th prompt
            each = num_generations if self.work.regular else 1
            return host(prompt_ids, images, fields, each)
        todo = [i for i, r in enumerate(rows) if r.asked]
        ask = todo or [0]  # every rank must enter the engine, even one with nothing to generate
        if self.trainer.use_vllm:  # TRL cuts the answer of a server, or of a tensor-parallel group, into equal shares
            most = max(sum(r.asked for r in part) for part in self.work.rows)
            ask = ask + ask[:1] * (most - len(ask))
        made: dict[int, tuple[list[int], list[float | None] | None]] = {}
        if todo or self.accelerator.num_processes > 1:
            prompts = [prompt_ids[i] + list(p.prefix if (p := rows[i].plan) else ()) for i in ask]
            part = {k: [v[i] for i in ask] if isinstance(v, list) else v for k, v in fields.items()}
            ids, logprobs = host(prompts, images, part, 1)
            for j, i in enumerate(todo):
                made[i] = self._with_prefix(rows[i].plan, ids[j], None if logprobs is None else logprobs[j])
        for i, row in enumerate(rows):
            if i not in made:
                given = row.given or Completion((eos,))
                made[i] = list(given.tokens), _sampled(given)
        out = [made[i][0] or [eos] for i in range(len(rows))]
        if not self.trainer.use_vllm and self.trainer.cheap_rollouts is None:
            return out, None
        return out, [made[i][1] or [None] * len(tokens) for i, tokens in enumerate(out)]

    def _with_prefix(
        self, plan: PlanRow | None, ids: list[int], logprobs: list[float | None] | None
    ) -> tuple[list[int], list[float | None] | None]:
        prefix = list(plan.prefix) if plan else []
        limit = self.trainer.max_completion_length
        limit = min(limit, plan.max_tokens) if plan and plan.max_tokens is not None else limit
        if not prefix and len(ids) <= limit:
            return ids, logprobs  # as they are: a trainer may have made more than a list of them
        tokens = (prefix + list(ids))[:limit]
        return tokens, None if logprobs is None else ([None] * len(prefix) + list(logprobs))[:limit]

    def with_observed(self, generated: tuple[Any, ...]) -> tuple[Any, ...]:
        """What TRL's `_generate` returned, with a mask of the tokens that were only read in given completions."""
        if self.programs or not any(r.given is not None and r.given.observed for r in self.work.flat):
            return generated
        prompts, ids, _, *rest = generated
        mask = [[1] * len(tokens) for tokens in ids]
        for i, row in enumerate(self.mine):
            if row.given is not None and row.given.observed:
                mask[i] = [int(not read) for read in row.given.observed]
        return prompts, ids, mask, *rest

    def score(self, host: Score, *columns: list[Any]) -> Tensor:
        """TRL's rewards of all ranks' rows; fillers are unscorable."""
        if self.work.rewards is not None:
            self.rewards = self.work.rewards
        elif any(r.rewards is not None for r in self.work.flat):
            self.rewards = self._missing_rewards(host, columns)
        else:
            rewards = host(*columns)
            filler = torch.tensor([r.plan is None for r in self.work.flat], device=rewards.device)
            self.rewards = torch.where(filler[:, None], torch.nan, rewards)
        return self.rewards

    def _missing_rewards(self, host: Score, columns: Sequence[list[Any]]) -> Tensor:
        """Rewards that are known (a program has them from `Score`, a given completion brings them), and TRL's for the
        other rows, which alone are computed.

        Args:
            columns: of this rank's rows, as TRL hands them to its reward functions.
        """
        t, everything = self.trainer, self.work.flat
        given = [r.rewards for r in everything]
        rewards = torch.full((len(everything), len(t.reward_funcs)), torch.nan, device=self.accelerator.device)
        size, rank = len(self.mine), self.accelerator.process_index
        asked = [r.plan is not None and given[i] is None for i, r in enumerate(everything)]
        each = [[i for i in range(size) if asked[k * size + i]] for k in range(len(self.work.rows))]
        most = max(map(len, each))
        if most:
            take = each[rank] + (each[rank][:1] or [0]) * (most - len(each[rank]))  # equally many on every rank
            inputs, prompts, completions, ids = ([x[i] for i in take] for x in columns)
            scored = host(inputs, prompts, completions, ids)
            for k, places in enumerate(each):
                at = k * size + torch.tensor(places, dtype=torch.int64, device=rewards.device)
                rewards[at] = scored[k * most : k * most + len(places)]
            self._spread_extra_columns(each[rank])
        for i, own in enumerate(given):
            if own is not None:
                rewards[i] = torch.tensor([own.get(n, torch.nan) for n in t.reward_func_names])
        return rewards

    def _spread_extra_columns(self, scored: list[int]) -> None:
        """What reward functions added to the table of completions, at the rows they saw."""
        for name, values in self.trainer._pending_extra_logs.items():
            full: list[Any] = [None] * len(self.mine)
            for i, value in zip(scored, values, strict=False):
                full[i] = value
            self.trainer._pending_extra_logs[name] = full

    # ---- what becomes of it

    @property
    def columns_wanted(self) -> set[str]:
        names = {"old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies", "sum_squared_probs"}
        return self.stack.needs & names

    def finish(self, out: HostBatch) -> HostBatch:
        """The batch TRL returned, with the decision of the driver applied."""
        out, columns = self._with_columns(out)
        decided = self.decided or self._decide(out["advantages"], columns)
        if decided.decision is not None and decided.lengths is not None:
            rows, regular = len(self.work.flat), self.work.regular
            logs.correct(self.trainer, decided.decision, rows, regular, decided.lengths, decided.metrics or {})
        self.decided = decided
        assert self.inside is not None
        out = self._with_versions(out)
        if self.trainer.updates_seen is not None and self.trainer.updates_seen.wants_ratios:
            first = sum(r.plan is not None for part in self.work.rows[: self.accelerator.process_index] for r in part)
            out = with_rows(out, len(self.inside), first)
        return apply_decision(self.trainer, out, self.inside, decided.mine, self.batch_rows)

    def _with_versions(self, out: HostBatch) -> HostBatch:
        """TRL's batch with the versions that hooks in the update see."""
        stack, now = self.stack, self.trainer.state.global_step
        if not stack.claimed("policy_loss", "regularize", "before_update"):
            return out
        ids = out["completion_ids"]
        new = {PUBLISHED: torch.tensor(now, device=ids.device)}
        if stack.claims["before_update"]:
            assert self.rows_version is not None
            for name, values in zip((VERSION, NEWEST_VERSION), self.rows_version, strict=True):
                new[name] = torch.full((len(ids),), now)
                new[name][: len(values)] = values
                new[name] = new[name].to(ids.device)
        if stack.in_loss("token_versions"):
            full = torch.full(tuple(ids.shape), now)
            if self.versions is not None:
                full[: self.versions.shape[0], : self.versions.shape[1]] = self.versions
            new[VERSIONS] = full.to(ids.device)
        return {**out, **new}

    def _with_columns(self, out: HostBatch) -> tuple[HostBatch, dict[str, Tensor]]:
        """TRL's batch with log-probs somebody needs and TRL did not compute (one pass at the weights that generated);
        and the columns methods asked for: signal -> (rows, time)."""
        t, wanted, out = self.trainer, self.columns_wanted, dict(out)
        engine, entropies = out.get("sampling_per_token_logps"), None
        sampled = "rollout_logprobs" in wanted and (
            engine is None or any(gather(self.accelerator, bool(torch.isnan(engine).any())))  # forced tokens have none
        )
        seen: list[Tensor] = []  # of each micro-batch
        if wanted & {"entropies", "sum_squared_probs"} or (
            ("old_logprobs" in wanted or sampled) and "old_per_token_logps" not in out
        ):
            with torch.no_grad(), head_output(t, "sum_squared_probs" in wanted, seen):
                logprobs, entropies, _ = t._get_per_token_logps_and_entropies(
                    t.model,
                    *model_input(out),
                    batch_size=t.args.per_device_train_batch_size,
                    compute_entropy="entropies" in wanted,
                    **more_model_input(out),
                )
            out.setdefault("old_per_token_logps", logprobs)
        if "rollout_logprobs" in wanted:
            out["rlp_rollout_logprobs"] = self._rollout_logprobs(out)
        found = {
            "old_logprobs": out.get("old_per_token_logps"),
            "rollout_logprobs": out.get("rlp_rollout_logprobs"),
            "ref_logprobs": out.get("ref_per_token_logps"),
            "entropies": entropies,
            "sum_squared_probs": torch.cat(seen)[:, -out["completion_ids"].size(1) :].exp() if seen else None,
        }
        return out, {name: c for name, c in found.items() if name in wanted and c is not None}

    def _rollout_logprobs(self, out: HostBatch) -> Tensor:
        """Log-probs of what was sampled: the engine's, else the policy's own (transformers samples from exactly it);
        given completions have their own. A token without one falls back to the policy at the start of the step."""
        old = out.get("old_per_token_logps")
        name = "sampling_per_token_logps" if "sampling_per_token_logps" in out else "old_per_token_logps"
        behavior = out[name].clone()
        for i, row in enumerate(self.mine):
            own: Sequence[float | None] | None = None
            if row.made is not None:
                own = row.made.trajectory.logprobs
            elif row.given is not None:
                own = row.given.logprobs
            if own:
                values = torch.from_numpy(np.array(own, np.float64))  # None is NaN
                behavior[i, : len(values)] = values.to(behavior)
        return behavior if old is None else torch.where(torch.isnan(behavior), old, behavior)

    def decide_in_host(self, advantages: Tensor) -> Tensor:
        """Decides while TRL's own method runs: advantages of all ranks' rows in, those to use out."""
        start = self.accelerator.process_index * len(self.mine)
        self.decided = self._decide(advantages[start : start + len(self.mine)], {})
        used = torch.zeros_like(advantages)  # those of other ranks are known, and logged, by the driver alone
        if self.decided.decision is not None:
            used[: len(self.decided.decision.rollouts)] = self.decided.decision.row_advantages.to(used)
        else:
            used[start : start + len(self.mine)] = self.decided.mine.row_advantages.to(used)
        return used

    def _decide(self, host_advantages: Tensor, columns: dict[str, Tensor]) -> RankDecision:
        """The driver gets every rank's rows and decides; each rank gets its part of the decision.

        Args:
            host_advantages: (local rows,) TRL's own.
            columns: signal -> (rows, time).
        """
        assert self.generated is not None and self.rewards is not None
        rewards = self.rewards
        local, self.inside, self.versions = collect(self.trainer, self.mine, self.generated, host_advantages, columns)
        self.rows_version = local.version, local.newest_version
        parts = to_driver(self.accelerator, local)
        of_programs = gather(self.accelerator, self.stack.metrics.take()) if self.programs else []
        on_driver_only: dict[str, Any] = {}

        def run() -> list[tuple[LocalDecision, int]]:
            seen = rollouts_of(self.trainer, self.work, self.prompts, rewards, parts)
            regular = seen.advantages if self.work.regular else None
            decision = decide(self.stack, seen.rollouts, seen.tokens, regular, self._estimator, self.batch_rows)
            check_full(self.stack, decision, self.batch_rows)
            sizes = [len(r) for r in self.work.rows]
            read = not self.trainer.tools and not self.programs  # TRL then counts every token of a completion
            lengths = seen.completion_length if read else decision.rollouts.length
            logged = combine([*of_programs, self.stack.metrics.take()]) | _staleness_of(decision)
            look_for_idle(self.stack, decision, logged)
            on_driver_only.update(decision=decision, lengths=lengths, metrics=logged)
            return [(part, self.stack.batch) for part in local_decisions(decision, sizes, self.batch_rows)]

        mine, self.stack.batch = on_driver_for_each(self.accelerator, run)
        return RankDecision(mine, **on_driver_only)

    def _estimator(self, rollouts: Rollouts) -> Tensor:
        """TRL's estimator for groups of any size."""
        if self.trainer.multi_objective_aggregation == "normalize_then_sum":
            return gdpo_advantages(rollouts.rewards, rollouts.reward_weights, rollouts.groups)
        return grpo_advantages(rollouts, self.trainer.scale_rewards)


def _sampled(given: Completion) -> list[float | None] | None:
    """Log-probs for TRL, which reads those of masked tokens, too."""
    if given.logprobs is None or given.observed is None:
        return None if given.logprobs is None else list(given.logprobs)
    return [0.0 if read else p for p, read in zip(given.logprobs, given.observed, strict=True)]


def _staleness_of(decision: Decision) -> dict[str, float]:
    """Metrics of the rows that are trained."""
    rows = decision.rollouts.subset(decision.trained)
    return staleness_metrics(rows.current_version - rows.newest_version, rows.staleness)


def _without_payload(rows: Sequence[PlanRow], kept: list[Any]) -> tuple[PlanRow, ...]:
    """Payloads stay on the driver, one for each rollout; the rest of the plan travels to all ranks."""
    kept += [p.payload for p in rows for _ in range(p.n + p.spare)]
    return tuple(p.replace(payload=None) for p in rows)
