"""One generation batch in TRL: plan, generate what the plan says, hand the rows to the driver, apply its decision.

`GenerationStep` lives while TRL's own `_generate_and_score_completions` runs. That method does all the work it always
does (tokenizing, generating, log-probs, rewards, logging); the step decides which rows it sees, and afterwards changes
the batch it returns.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from rl_plugins.errors import ConfigError, MethodError
from rl_plugins.estimators import gdpo_advantages, grpo_advantages
from rl_plugins.rollouts import Completion, GroupSoFar, Plan, PlanRow, Rollouts, weighted_reward
from rl_plugins.runtime.decide import Decision, decide
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan, next_plan
from rl_plugins.trl import logs
from rl_plugins.trl.batch import LocalDecision, apply_decision, local_decisions
from rl_plugins.trl.programs import ProgramRow, run_programs, served
from rl_plugins.trl.prompts import PROMPT_INDEX, Prompts, strip
from rl_plugins.trl.queue import run_queue
from rl_plugins.trl.ranks import deal, gather, on_driver
from rl_plugins.trl.rows import collect, flat, rollouts_of

T = TypeVar("T")
MAX_ROUNDS = 64


@dataclass(frozen=True)
class Row:
    """One completion to make: rollout `number` of a plan row. `plan` is None for a filler."""

    plan: PlanRow | None
    number: int = 0
    done: Completion | None = None  # given by the plan, or made in an earlier round
    made: ProgramRow | None = None  # by a rollout program

    @property
    def given(self) -> Completion | None:
        if self.done is None and self.plan is not None and self.number < len(self.plan.given):
            return self.plan.given[self.number]
        return self.done


FILLER = Row(plan=None)


@dataclass(frozen=True)
class _Made:
    """A row of an earlier round: with its completion, its rewards, and its columns of the completions table."""

    row: Row
    reward: list[float]
    extra: dict[str, Any]
    serial: int  # in the order of generation

    @property
    def plan(self) -> PlanRow:
        assert self.row.plan is not None
        return self.row.plan

    @property
    def group(self) -> int:
        return self.plan.group


class GenerationStep:
    """One generation batch of one rank.

    Args:
        trainer: the trainer.
        inputs: this rank's rows of the dataloader, every prompt repeated `num_generations` times.
    """

    def __init__(self, trainer: Any, inputs: list[dict[str, Any]]) -> None:
        self.trainer = trainer
        self.stack = trainer.methods
        self.accelerator = trainer.accelerator
        self.group_size: int = trainer.num_generations
        self.batch_rows: int = trainer.args.generation_batch_size
        self.local_batch = self.batch_rows // self.accelerator.num_processes
        self.serving = False  # `_generate_single_turn` serves the plan's rows the first time it is called
        self.generated: tuple[Any, ...] | None = None  # what TRL's `_generate` returned
        self.rewards: Tensor | None = None  # (all rows, functions) in rank order, fillers NaN
        self.final_rewards: Tensor | None = None  # of rounds: known before TRL asks
        self.decision: list[LocalDecision] | None = None
        self.payload: list[Any] = []  # of every row, on the driver only
        self.full_decision: Decision | None = None  # on the driver only
        self.driver_metrics: dict[str, float] = {}
        self.rows: list[list[Row]] = []

        proposal = [
            int(x.get(PROMPT_INDEX, -1))
            for part in gather(self.accelerator, [{PROMPT_INDEX: x.get(PROMPT_INDEX, -1)} for x in inputs])
            for x in part
        ][:: self.group_size]
        self.loader_rows = strip(inputs)
        self.prompts = Prompts(trainer.train_dataset, proposal, self.loader_rows, self.accelerator, self.group_size)
        self.mine: list[Row] = []
        self.regular = self.as_proposed = False
        self.programs = self.stack.claimed("rollout", "admit")  # rows are made before TRL's own method runs

    # ---- what is generated

    def plan(self) -> None:
        """Decides the rows of every rank; with rounds, they are generated and scored here."""
        if self.stack.claims["admit"]:
            self._serve_made(run_queue(self))
            return
        rounds = any(m.rounds for m in self.stack.methods)

        def first() -> tuple[PlanRow, ...]:
            plan = first_plan(
                self.stack,
                self.prompts.proposal,
                self.group_size,
                self.batch_rows,
                self.prompts.size,
                self.prompts.dataset,
            )
            self._check_plan(plan)
            return self._keep_payload(plan.rows)

        plan = on_driver(self.accelerator, first)
        rows = [Row(p, i) for p in plan for i in range(p.n + p.spare)]
        self.regular = (  # TRL's own advantages are of these groups
            not rounds
            and not self.programs
            and len(rows) == self.batch_rows
            and all(p.n == self.group_size and not p.spare for p in plan)
            and len({p.group for p in plan}) == len(plan)
        )
        self.as_proposed = self.regular and all(
            p == PlanRow(q, p.group, self.group_size) for p, q in zip(plan, self.prompts.proposal, strict=True)
        )
        if rounds:
            rows = self._rounds(rows)
        elif self.programs:
            self._serve_made(run_programs(self.trainer, plan, self.prompts.row))
            return
        self.rows = deal(rows, self.accelerator.num_processes, self.local_batch, FILLER)

    def _serve_made(self, made: Sequence[ProgramRow]) -> None:
        """Rows that exist already; TRL's own method gets them instead of generating."""
        self.payload = [m.plan.payload for m in made]
        rows = [Row(m.plan, m.rollout, made=m) for m in made]
        self.rows = deal(rows, self.accelerator.num_processes, self.local_batch, FILLER)

    def _keep_payload(self, rows: Sequence[PlanRow]) -> tuple[PlanRow, ...]:
        """Payloads stay on the driver, unless a program wants them; the rest of the plan travels to all ranks."""
        if self.programs:
            return tuple(rows)
        self.payload += [p.payload for p in rows for _ in range(p.n + p.spare)]
        return tuple(p.replace(payload=None) for p in rows)

    def _check_plan(self, plan: Plan) -> None:
        """Refuses what this run cannot generate."""
        t = self.trainer
        special = [p for p in plan.rows if p.given or p.prefix or p.max_tokens is not None]
        if special and (t.rollout_func is not None or t.tools):
            raise ConfigError(
                "The plan gives completions, prefixes or token limits, which cannot be combined with rollout_func, "
                "tools or environments: those make the completions themselves. Remove them or the method."
            )
        if self.prompts.has_images and (plan.generated != self.batch_rows or special):
            raise ConfigError(
                f"The plan generates {plan.generated} completions for a batch of {self.batch_rows} with images; rows "
                f"of image batches cannot be added or cut yet. Remove the method that changes the plan."
            )
        for p in special:
            self.check_plan_row(p)

    def check_plan_row(self, p: PlanRow) -> None:
        """Refuses what does not fit into a completion."""
        t = self.trainer
        limit = min(p.max_tokens or t.max_completion_length, t.max_completion_length)
        longest = max([len(c.tokens) for c in p.given], default=0)
        if len(p.prefix) >= limit or longest > t.max_completion_length:
            raise MethodError(
                f"The plan gives prompt {p.prompt_index} a prefix of {len(p.prefix)} and completions of up to "
                f"{longest} tokens; the completion length is {limit}."
            )

    def _rounds(self, rows: list[Row]) -> list[Row]:
        """Generates and scores round by round until no method asks for more; TRL is then served from what is there."""
        acc, round_ = self.accelerator, 0
        made: list[_Made] = []
        plans: list[PlanRow] = []
        while rows:
            plans += [r.plan for r in rows if r.plan is not None and r.number == 0]
            self.rows = deal(rows, acc.num_processes, 1, FILLER)
            parts = gather(acc, self._generate_round(self.rows[acc.process_index]))
            results = zip(flat(self.rows), flat([p[1] for p in parts]), parts[0][0], strict=True)
            for row, (completion, extra), reward in results:
                if row.plan is not None:
                    made.append(_Made(replace(row, done=completion), reward, extra, len(made)))
            round_ += 1
            if round_ > MAX_ROUNDS:
                names = ", ".join(f"`{m.name}`" for m in self.stack.methods if m.rounds)
                raise MethodError(f"{names} asked for more rollouts in {MAX_ROUNDS} rounds of one step without an end.")

            def more(round_: int = round_, plans: list[PlanRow] = plans) -> tuple[PlanRow, ...]:
                weights = self.trainer.reward_weights.double().cpu()
                groups: dict[int, list[_Made]] = {}
                for m in made:
                    groups.setdefault(m.group, []).append(m)
                so_far = tuple(
                    GroupSoFar(g[0].plan, weighted_reward(torch.tensor([m.reward for m in g]).double(), weights))
                    for g in groups.values()
                )
                left = self.batch_rows - sum(p.n for p in plans)
                plan = next_plan(self.stack, Plan((), self.group_size, left, round_, so_far, self.stack.batch))
                self._check_plan(plan)
                return self._keep_payload(plan.rows)

            rows = [Row(p, i) for p in on_driver(acc, more) for i in range(p.n + p.spare)]
        made.sort(key=lambda m: m.group)  # groups whole, in them the order of the rounds
        if self.payload:
            self.payload = [self.payload[m.serial] for m in made]
        total = max(-(-len(made) // acc.num_processes), self.local_batch) * acc.num_processes
        nothing = [[float("nan")] * len(self.trainer.reward_funcs)] * (total - len(made))
        self.final_rewards = torch.tensor([m.reward for m in made] + nothing, device=acc.device)
        self.extra_columns = [m.extra for m in made]
        return [m.row for m in made]

    def _generate_round(self, mine: list[Row]) -> tuple[list[list[float]], list[tuple[Completion, dict[str, Any]]]]:
        """One round on this rank: rewards of all ranks; this rank's completions and columns of the completions table.
        TRL's counters and metrics are put back, because TRL counts these rows again when it is served with them."""
        t = self.trainer
        seen, metrics = t.state.num_input_tokens_seen, {k: list(v) for k, v in t._metrics["train"].items()}
        self.mine = mine
        inputs = self._inputs(mine)
        self.serving = True
        prompts = [x["prompt"] for x in inputs]
        _, ids, _, completions, logprobs, *_ = t._generate(prompts)
        rewards = t._calculate_rewards(inputs, prompts, completions, ids)
        t.state.num_input_tokens_seen = seen
        t._metrics["train"].clear()
        t._metrics["train"].update(metrics)
        extra = [{k: v[i] for k, v in t._pending_extra_logs.items() if i < len(v)} for i in range(len(mine))]
        t._pending_extra_logs.clear()
        made = [Completion(tuple(c), None if logprobs is None else tuple(logprobs[i])) for i, c in enumerate(ids)]
        return rewards.double().tolist(), list(zip(made, extra, strict=True))

    # ---- while TRL's own method runs

    @contextlib.contextmanager
    def host_view(self) -> Iterator[list[dict[str, Any]]]:
        """This rank's inputs, with TRL's settings bent for as long as its own method runs on them."""
        t = self.trainer
        self.mine = self.rows[self.accelerator.process_index]
        logs.make_room(t, sum(map(len, self.rows)))
        if self.final_rewards is not None:
            self._restore_extra_columns()
        inputs = self.loader_rows if self.as_proposed else self._inputs(self.mine)
        t.num_generations = self.group_size if self.regular else 1  # groups of other sizes mean nothing to TRL
        self.serving, self.generated = not self.programs, None
        before = t.rollout_func
        if self.programs:  # what the programs made, in the place TRL has for it
            t.rollout_func = lambda prompts, trainer: served([r.made for r in self.mine], prompts, trainer)
        try:
            yield inputs
        finally:
            t.num_generations, t.rollout_func = self.group_size, before
            self.serving = False

    def _restore_extra_columns(self) -> None:
        each, k = len(self.mine), self.accelerator.process_index
        local = self.extra_columns[k * each : (k + 1) * each]
        for name in {n for x in self.extra_columns for n in x}:
            values = [x.get(name) for x in local]
            self.trainer._pending_extra_logs[name].extend(values + [None] * (each - len(local)))

    def _inputs(self, rows: Sequence[Row]) -> list[dict[str, Any]]:
        anything = next(r.plan for r in flat(self.rows) if r.plan is not None)
        inputs = [self.prompts.row(r.plan or anything) for r in rows]
        if self.programs:  # what a program notes of a row is a column for reward functions
            names = dict.fromkeys(k for r in flat(self.rows) if r.made for k in r.made.trajectory.meta)
            for row, x in zip(rows, inputs, strict=True):
                x |= {k: (row.made.trajectory.meta if row.made else {}).get(k, x.get(k)) for k in names}
        return inputs

    def generate(
        self,
        host: Callable[..., Any],
        prompt_ids: list[list[int]],
        images: Any,
        fields: dict[str, Any],
        num_generations: int,
        **kwargs: Any,
    ) -> tuple[list[list[int]], Any]:
        """Serves TRL's request for one completion per row: given ones as they are, the others from the engine."""
        self.serving = False
        rows = self.mine
        if all(
            r.plan is not None and r.given is None and not r.plan.prefix and r.plan.max_tokens is None
            for r in flat(self.rows)  # of all ranks: they must make the same request
        ):
            # a vLLM server is asked for `each` completions of every each-th prompt
            each = num_generations if self.regular else 1
            return host(prompt_ids, images, fields, each, **kwargs)  # type: ignore[no-any-return]
        todo = [i for i, r in enumerate(rows) if r.plan is not None and r.given is None]
        ask = todo or [0]  # every rank must enter the engine, even one with nothing to generate
        if self.trainer.use_vllm:  # TRL cuts the answer of a server, or of a tensor-parallel group, into equal shares
            most = max(sum(r.plan is not None and r.given is None for r in part) for part in self.rows)
            ask = ask + ask[:1] * (most - len(ask))
        made: dict[int, tuple[list[int], list[float | None] | None]] = {}
        if todo or self.accelerator.num_processes > 1:
            plans = [rows[i].plan for i in ask]
            prompts = [prompt_ids[i] + list(p.prefix if p else ()) for i, p in zip(ask, plans, strict=True)]
            part = {k: [v[i] for i in ask] if isinstance(v, list) else v for k, v in fields.items()}
            ids, logprobs = host(prompts, images, part, 1, **kwargs)
            for j, i in enumerate(todo):
                made[i] = self._with_prefix(rows[i].plan, ids[j], None if logprobs is None else logprobs[j])
        out, out_logprobs = [], []
        eos = self.trainer.eos_token_ids[0]
        for i, row in enumerate(rows):
            if i in made:
                tokens, logprob = made[i]
            else:
                given = row.given or Completion((eos,))
                tokens = list(given.tokens)
                logprob = None if given.logprobs is None else list(given.logprobs)
            out.append(tokens or [eos])
            out_logprobs.append(logprob or [None] * len(out[-1]))
        return out, out_logprobs if self.trainer.use_vllm else None

    def _with_prefix(self, plan: PlanRow | None, ids: list[int], logprobs: Any) -> tuple[list[int], Any]:
        prefix = list(plan.prefix) if plan else []
        limit = self.trainer.max_completion_length
        limit = min(limit, plan.max_tokens) if plan and plan.max_tokens is not None else limit
        tokens = (prefix + list(ids))[:limit]
        return tokens, None if logprobs is None else ([None] * len(prefix) + list(logprobs))[:limit]

    def score(self, host: Callable[..., Tensor], *args: Any) -> Tensor:
        """TRL's rewards of all ranks' rows; fillers are unscorable."""
        if self.final_rewards is not None:
            self.rewards = self.final_rewards.to(torch.float32)
            return self.rewards
        if self.programs:
            self.rewards = self._program_rewards(host, *args)
            return self.rewards
        rewards = host(*args)
        filler = torch.tensor([r.plan is None for r in flat(self.rows)], device=rewards.device)
        self.rewards = torch.where(filler[:, None], torch.nan, rewards)
        return self.rewards

    def _program_rewards(
        self, host: Callable[..., Tensor], inputs: list[Any], prompts: list[Any], completions: list[Any], ids: list[Any]
    ) -> Tensor:
        """Rewards a program has from `Score` already, and TRL's for the other rows, which alone are computed."""
        t = self.trainer
        known = [[r.made is not None and r.made.trajectory.rewards is not None for r in part] for part in self.rows]
        each = [
            [i for i, r in enumerate(part) if r.plan is not None and not done[i]]
            for part, done in zip(self.rows, known, strict=True)
        ]
        most, rank = max(map(len, each)), self.accelerator.process_index
        rewards = torch.full((sum(map(len, self.rows)), len(t.reward_funcs)), torch.nan, device=self.accelerator.device)
        if most:
            take = each[rank] + (each[rank][:1] or [0]) * (most - len(each[rank]))  # equally many on every rank
            columns = [[x[i] for i in take] for x in (inputs, prompts, completions, ids)]
            scored = host(*columns)
            start = 0
            for k, part in enumerate(self.rows):
                places = torch.tensor([start + i for i in each[k]], dtype=torch.int64, device=rewards.device)
                rewards[places] = scored[k * most : k * most + len(places)]
                start += len(part)
            self._spread_extra_columns(take[: len(each[rank])])
        for i, row in enumerate(flat(self.rows)):
            if row.made is not None and row.made.trajectory.rewards is not None:
                given = row.made.trajectory.rewards
                rewards[i] = torch.tensor([given.get(n, torch.nan) for n in t.reward_func_names])
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
        return self.stack.needs & {"old_logprobs", "rollout_logprobs", "ref_logprobs", "entropies"}

    def finish(self, out: dict[str, Any]) -> dict[str, Any]:
        """The batch TRL returned, with the decision of the driver applied."""
        self._add_columns(out)
        if self.decision is None:
            self.decide(out["advantages"], out)
        assert self.decision is not None
        if self.full_decision is not None:
            logs.correct(self, self.full_decision)
        return apply_decision(self, out, self.decision[self.accelerator.process_index])

    def _add_columns(self, out: dict[str, Any]) -> None:
        """Log-probs and entropies somebody needs and TRL did not compute: one pass at the weights that generated."""
        t, wanted = self.trainer, self.columns_wanted
        engine = out.get("sampling_per_token_logps")
        sampled = "rollout_logprobs" in wanted and (
            engine is None or any(gather(self.accelerator, bool(torch.isnan(engine).any())))  # forced tokens have none
        )
        if "entropies" in wanted or (("old_logprobs" in wanted or sampled) and "old_per_token_logps" not in out):
            ids = torch.cat([out["prompt_ids"], out["completion_ids"]], 1)
            mask = torch.cat([out["prompt_mask"], out["completion_mask"]], 1)
            forward = {k: out[k] for k in _FORWARD_KEYS if k in out}
            with torch.no_grad():
                logprobs, entropies, _ = t._get_per_token_logps_and_entropies(
                    t.model,
                    ids,
                    mask,
                    out["completion_ids"].size(1),
                    batch_size=t.args.per_device_train_batch_size,
                    compute_entropy="entropies" in wanted,
                    **forward,
                )
            out.setdefault("old_per_token_logps", logprobs)
            if "entropies" in wanted:
                out["rlp_entropies"] = entropies
        if "rollout_logprobs" in wanted:
            out["rlp_rollout_logprobs"] = self._rollout_logprobs(out)

    def _rollout_logprobs(self, out: dict[str, Any]) -> Tensor:
        """Log-probs of what was sampled: the engine's, else the policy's own (transformers samples from exactly it);
        given completions have their own. A token without one falls back to the policy at the start of the step."""
        old = out.get("old_per_token_logps")
        behavior: Tensor = out[
            "sampling_per_token_logps" if "sampling_per_token_logps" in out else "old_per_token_logps"
        ]
        behavior = behavior.clone()
        for i, row in enumerate(self.mine):
            if row.made is not None and len(row.made.trajectory):
                own = torch.tensor(row.made.trajectory.logprobs)
                behavior[i, : len(own)] = own.to(behavior)
            elif row.given is not None and row.given.logprobs is not None:
                own = torch.tensor([float("nan") if p is None else p for p in row.given.logprobs])
                behavior[i, : len(own)] = own.to(behavior)
        return behavior if old is None else torch.where(torch.isnan(behavior), old, behavior)

    def decide_in_host(self, advantages: Tensor) -> Tensor:
        """Decides while TRL's own method runs: advantages of all ranks' rows in, those to use out."""
        start = self.accelerator.process_index * len(self.mine)
        self.decide(advantages[start : start + len(self.mine)], None)
        assert self.decision is not None
        return torch.cat([d.row_advantages for d in self.decision]).to(advantages)

    def decide(self, host_advantages: Tensor, out: dict[str, Any] | None) -> None:
        """Gathers every rank's rows to the driver, lets it decide, and hands each rank its part.

        Args:
            host_advantages: (local rows,) TRL's own.
            out: TRL's batch if it exists already; None while TRL's own method still runs (then no column is needed).
        """
        parts = gather(self.accelerator, collect(self, host_advantages, out))

        def run() -> tuple[list[LocalDecision], int]:
            rollouts, tokens, advantages = rollouts_of(self, parts)
            decision = decide(
                self.stack, rollouts, tokens, advantages if self.regular else None, self._estimator, self.batch_rows
            )
            self.full_decision, self.driver_metrics = decision, combine([self.stack.metrics.take()])
            return local_decisions(decision, tokens, [len(r) for r in self.rows], self.batch_rows), self.stack.batch

        self.decision, self.stack.batch = on_driver(self.accelerator, run)

    def _estimator(self, rollouts: Rollouts) -> Tensor:
        """TRL's estimator for groups of any size."""
        t = self.trainer
        if t.multi_objective_aggregation == "normalize_then_sum":
            return gdpo_advantages(rollouts.rewards, rollouts.reward_weights, rollouts.groups)
        return grpo_advantages(rollouts, t.scale_rewards)


_FORWARD_KEYS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)
