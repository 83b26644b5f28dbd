"""verl's V1 trainers with methods: one mixin over each of them, registered under a name of its own.

Every override calls `super()`. What belongs to one batch is in batch.py, to the prompts in prompts.py, to the loss in
loss.py. What verl calls a global step has one generation batch, in `separate_async` several.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
import torch
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils import tensordict_utils as tu
from verl.utils.config import omega_conf_to_dataclass

from rl_plugins.core.errors import MethodError
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.runtime.chat import check_teacher
from rl_plugins.runtime.costs import NOTE, Costs
from rl_plugins.runtime.fingerprint import fingerprint
from rl_plugins.runtime.plan import in_evaluation
from rl_plugins.runtime.resume import resume, save_run
from rl_plugins.runtime.rounds import Rounds, in_rounds
from rl_plugins.runtime.staleness import staleness_metrics
from rl_plugins.runtime.update import SKIPPED, SkippedSteps
from rl_plugins.verl import host, loss, scores, start
from rl_plugins.verl.batch import (
    Decided,
    Decisions,
    Selected,
    clean_padding,
    complete_rollout_logprobs,
    fetch,
    is_padding,
    keep_sum_squared_probs,
    logprob_multiple,
    planned_rows,
    put,
    weigh_rewards,
    whole_group_order,
)
from rl_plugins.verl.capabilities import MAX_VERSIONS, Known, Reader
from rl_plugins.verl.client import with_versions
from rl_plugins.verl.compat import states_its_mode
from rl_plugins.verl.config import MODES, chat_of, end_tokens
from rl_plugins.verl.costs import Meters
from rl_plugins.verl.evaluation import PlannedBatches
from rl_plugins.verl.processes import Watch, ask, confirm, died
from rl_plugins.verl.prompts import PLANNED_AGENT, PROMPT_INDEX, PromptBatches, messages_of, number_rows
from rl_plugins.verl.rewards import with_reward_functions
from rl_plugins.verl.rows import GROUP, TOKEN_COLUMNS, flat, notes_of, read_rollouts, split
from rl_plugins.verl.saved import ACCEPT, check_saved, host_files, save_costs, saved_costs
from rl_plugins.verl.teacher import read_by_teacher
from rl_plugins.verl.versions import Snapshots

SUM_PI_SQUARED = "calculate_sum_pi_squared"  # of verl's engine
POLL_INTERVAL = 0.2  # seconds; verl's 2.0 would be most of a short batch


class MethodsTrainer(host.Trainer):
    """Mixin over a trainer of verl. Without methods every override hands on to the host; only the weights of rewards,
    where the config has some, act as with methods.

    Attributes:
        methods: the stack; the only copy of the methods' state.
        methods_mode: the mode of verl that is followed.
        costs: what the run has cost so far.
    """

    methods_mode = "sync"

    def __init__(self, config: Any) -> None:
        prepared = start.prepare(config, type(self))
        assert prepared is not None  # a trainer of ours without the node is refused there
        self.settings, self.methods = prepared.settings, prepared.stack
        self._selected: Selected | None = None  # the batch between selection and settlement
        self._decided: Decided | None = None
        self._first_balance, self._ranks = False, 1  # which balance of a batch this is, and ranks that train
        self._logged: list[dict[str, float]] = []
        self._ages: list[torch.Tensor] = []  # (2, rows) of every batch of a step: staleness of newest and oldest tokens
        self._steps_since = 0  # optimizer steps since the newest publication
        self._skipped = SkippedSteps()
        self._submitted: dict[str, PlanRow] = {}  # uid -> plan row, of the batch that is generated
        self._planned_prompts = 0
        self.costs = Costs()
        self._snapshots: Snapshots | None = None
        self._counts_costs = bool(self.methods) or self.settings.count_costs
        super().__init__(config)
        if self.methods:
            chosen = config.trainer.v1.sampler.get("poll_interval")  # a key of patches/verl/V11; 2.0 is its default
            self.replay_buffer.poll_interval = POLL_INTERVAL if chosen in (None, 2.0) else chosen
            self._host_sample = self.replay_buffer.sample
            self.replay_buffer.sample = self._sample

    # ---- start

    def on_init_end(self) -> None:
        if self.methods:
            self._prompts = PromptBatches(self.train_dataset, self.config, self.settings.rewards)
            frame = getattr(self.train_dataset, "dataframe", None)  # the rows as they were read, without a template
            if self.methods.teacher is not None:
                check_teacher(self.tokenizer, self.methods.teacher)
            self._fingerprint = fingerprint(self.train_dataset if frame is None else frame)
            model = omega_conf_to_dataclass(self.config.actor_rollout_ref.model)
            rows = model.hf_config.get_text_config().vocab_size  # some have no text
            self.methods.vocabulary = max(len(self.tokenizer), rows)
            number_rows(self.train_dataset)
            self.methods.check(self.known().run())  # again: now the dataset is known, too
            template = self.config.data.get("apply_chat_template_kwargs")
            self._chat = chat_of(self.tokenizer, end_tokens(model), template)
            run = replace(self.known().run(), fingerprint=self._fingerprint, chat=self._chat)
            self.methods.start(with_reward_functions(run, Reader(self.config), self.settings.rewards))
            if self.global_steps:
                self._load_state()
        elif self.global_steps:
            self._check_saved()
            if self._counts_costs:
                self.costs = Costs.of_checkpoint(saved_costs(self._resumed_from))
        super().on_init_end()

    def known(self) -> Known:
        """What methods are told of this run."""
        data = self.train_dataset
        return Known(Reader(self.config, self.methods_mode), self.settings, data, len(data), self.total_training_steps)

    def fit(self, agent_loop_manager: host.AgentLoopManager) -> None:
        if self.methods:
            self.agent_loop_manager = agent_loop_manager
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            self.actor_rollout_wg.set_loss_fn(loss.MethodsLoss(actor, self.settings, self.config))
            workers = {
                "training": self.actor_rollout_wg.workers,
                "agent loop": agent_loop_manager.agent_loop_workers,
                "reward": self.get_reward_handles() or [],
            }
            print(confirm(self.methods, workers), flush=True)
            if self.methods_mode == "separate_async" and any(
                m.old_policy == "generating" for m in self.methods.methods
            ):
                temperature = float(self.config.actor_rollout_ref.rollout.temperature)
                self._snapshots = Snapshots(self.actor_rollout_wg, Reader(self.config)(MAX_VERSIONS), temperature)
            stepwise = (tuple(self.settings.rewards) or ("score",)) if "step_rewards" in self.methods.needs else ()
            ask(agent_loop_manager.agent_loop_workers, scores.install, self.settings.on_reward_error, stepwise)
            watch = Watch({f"agent loop {i}": w for i, w in enumerate(agent_loop_manager.agent_loop_workers)})
            self._watch = watch
            wait = self.replay_buffer._wait_for_next_poll

            def watched_wait(*args: Any, **kwargs: Any) -> float:
                watch.check()
                return wait(*args, **kwargs)

            self.replay_buffer._wait_for_next_poll = watched_wait
        if self._counts_costs:
            self._meters = Meters(agent_loop_manager.agent_loop_workers)
        super().fit(agent_loop_manager)
        for watcher in self.methods.watchers:
            watcher.ended()

    def get_llm_client(self) -> Any:
        client = super().get_llm_client()
        resumed = self.methods_mode != "sync"  # in sync all tokens of a rollout are of one version
        return with_versions(client) if resumed and "token_versions" in self.methods.needs else client

    # ---- state

    @property
    def _checkpoint(self) -> str:
        """Folder of the checkpoint of this step."""
        return os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")

    @property
    def _resumed_from(self) -> str:
        trainer = self.config.trainer
        return str(trainer.resume_from_path) if trainer.resume_mode == "resume_path" else self._checkpoint

    def _check_saved(self) -> None:
        accept = self.settings.accept_changed_checkpoint
        check_saved(self._resumed_from, self._savers, self.methods, self.settings.seed, accept)

    @property
    def _savers(self) -> list[Any]:
        """Workers that write shards of a checkpoint."""
        groups = [self.actor_rollout_wg, *([self.critic_wg] if self.use_critic else [])]
        return [worker for group in groups for worker in group.workers]

    def _load_state(self) -> None:
        self._check_saved()
        folder, step = self._resumed_from, self.global_steps
        batch, accept = step * self.parameter_sync_step, self.settings.accept_changed_checkpoint
        saved = resume(
            self.methods, folder, fingerprint=self._fingerprint, step=step, batch=batch, option=ACCEPT, accept=accept
        )
        self.costs = Costs.of_checkpoint(saved or saved_costs(folder))

    def _save_checkpoint(self) -> None:
        # first: verl's last act is the tracker file that makes the checkpoint findable
        if self.methods:
            os.makedirs(self._checkpoint, exist_ok=True)
            state = {**self.methods.state_dict(self._fingerprint), NOTE: self._counted().plain()}
            save_run(self._checkpoint, state, self.global_steps)
        elif self._counts_costs:
            save_costs(self._checkpoint, self._counted())
        super()._save_checkpoint()
        writes_on = self.config.actor_rollout_ref.actor.get("checkpoint", {}).get("async_save", False)
        if self.methods and not writes_on:  # once more, with the checksums of what verl has written
            started = time.perf_counter()
            files = host_files(self._checkpoint, self._savers)
            self.timing_raw["checksums"] = time.perf_counter() - started
            save_run(self._checkpoint, state, self.global_steps, files)

    # ---- what is generated

    def _next_train_batch(self, num_prompts: int | None = None) -> host.Columns:
        batch = super()._next_train_batch(num_prompts)
        if not self.methods:
            return batch
        proposal, known = [int(i) for i in batch[PROMPT_INDEX]], self.known()
        size, plans = int(self.config.data.train_batch_size), []
        for first in range(0, len(proposal), size):  # a warm-up has several batches
            part = proposal[first : first + size]
            plans.append(known.plan(self.methods, part))
            known.check_plan(self.methods, plans[-1], len(part))
        planned, uids = self._build([row for plan in plans for row in plan.rows], sizes=[len(p.rows) for p in plans])
        if num_prompts is None:
            self._submitted, self._planned_prompts = uids, len(uids)
        else:  # verl refills what it evicted
            self._submitted |= uids
        return planned

    def _build(
        self, rows: Sequence[PlanRow], wave: str | None = None, round_: int = 0, sizes: Sequence[int] = ()
    ) -> tuple[host.Columns, dict[str, PlanRow]]:
        """Prompts of a plan, or of several of these sizes, as verl's batch, and uid -> plan row."""
        stack = self.methods
        draw = stack.draw - max(0, len(sizes) - 1)
        programs = stack.claimed("rollout")
        planned = self._prompts.build(rows, wave, round_, stack.batch, draw, programs, sizes, self._published)
        tu.assign_non_tensor_data(planned, "global_steps", self.global_steps)
        return planned, dict(zip(map(str, planned["uid"]), rows, strict=True))

    def _sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[host.Batch, dict[str, Any]]:
        """verl's sampling, of as many prompts as were planned; methods with rounds ask for more until they have all."""
        training = partition_id == "train" and bool(self.methods)
        if training and self.methods_mode == "sync":
            batch_size = self._planned_prompts
        try:
            batch, metrics = self._host_sample(
                global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
            )
        finally:  # verl goes on without a prompt that failed, or ends with an error that does not say why
            if self.methods.claimed("rollout"):
                self._watch.check(wait=True)
        if training and in_rounds(self.methods):
            batch = self._rounds(batch, global_steps)
        if training:
            self._count_missing(batch)
        return batch, metrics

    def _rounds(self, batch: host.Batch, global_steps: int) -> host.Batch:
        """The batch with the rollouts of all further rounds."""
        size = self._prompts.group_size
        budget = self.config.data.train_batch_size * size
        rounds = Rounds(self.methods, list(self._submitted.values()), size, budget, len(self.train_dataset))
        while True:
            rows = planned_rows(batch, self.settings.rewards)
            notes = notes_of(rows)
            made = read_rollouts(rows, batch, None, self.settings.rewards, self.tokenizer, self.methods.batch)
            more = rounds.more(torch.tensor([note["group"] for note in notes]), made.reward)
            if not more:
                return batch
            prompts, uids = self._build(more, notes[0]["wave"], rounds.number)
            self._submitted |= uids
            self._submit_batch_to_rollout(prompts)
            added, _ = self._host_sample(global_steps=global_steps, partition_id="train", batch_size=len(more))
            batch = KVBatchMeta(
                partition_id=batch.partition_id,
                keys=[*batch.keys, *added.keys],
                tags=[*batch.tags, *added.tags],
                extra_info=batch.extra_info,
            )

    def _count_missing(self, batch: host.Batch) -> None:
        """verl goes on when agent loops fail; completions a plan gave must not be lost that way."""
        if self.methods_mode != "sync" or self.config.algorithm.filter_groups.enable:
            return  # what is missing was evicted
        if self.methods.claimed("rollout"):
            return  # a program may make fewer, and one that fails ends the run
        made: dict[str, set[int]] = {uid: set() for uid in self._submitted}
        for key in batch.keys:
            uid, session, _ = split(key)
            made.setdefault(uid, set()).add(session)
        short = {uid: row for uid, row in self._submitted.items() if len(made[uid]) < row.n + row.spare}
        special = [row.prompt_index for row in short.values() if row.given or row.prefix]
        if special:
            raise MethodError(
                f"The agent loop `{PLANNED_AGENT}` lost completions that the plan gives for the prompts {special[:8]}; "
                f"the reason stands in the log of the agent-loop workers."
            )
        missing = sum(row.n + row.spare - len(made[uid]) for uid, row in short.items())
        if missing:
            self.methods.warn_once(f"{missing} rollouts of this batch are missing: their agent loops failed.")

    def _submit_batch_to_rollout(self, batch: host.Columns) -> int:
        try:
            return super()._submit_batch_to_rollout(batch)
        except ray.exceptions.RayActorError as e:
            raise died("agent loop", e) from e

    def on_validate_begin(self) -> None:
        super().on_validate_begin()
        if in_evaluation(self.methods, "plan"):
            n = self.config.actor_rollout_ref.rollout.val_kwargs.n
            self._host_loader = self.val_dataloader
            self.val_dataloader = PlannedBatches(self._host_loader, self.methods, self._prompts, n)

    def on_validate_end(self) -> None:
        if isinstance(self.val_dataloader, PlannedBatches):
            self.val_dataloader = self._host_loader
        super().on_validate_end()

    # ---- one batch

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> host.Batch:
        self._logged, self._ages, self._steps_since = [], [], 0
        batch = super().step(metrics, timing_raw)
        # verl would reduce values by what their names contain ("min" of "minpro"); these are means over the batches
        for name in sorted({n for logged in self._logged for n in logged}):
            values = [logged[name] for logged in self._logged if name in logged]
            metrics[name] = sum(values) / len(values)
        if self._ages:
            metrics |= staleness_metrics(*torch.cat(self._ages, dim=1))
        if self._counts_costs:
            metrics |= self._counted().logged()
        if self.methods.stop_reason:
            self._save_checkpoint()
            raise self.methods.stopped(self._checkpoint)
        return batch

    def _counted(self) -> Costs:
        """The costs so far, all agent-loop workers asked."""
        try:
            self.costs += self._meters.take()
        except ray.exceptions.RayActorError as e:
            raise died("agent loop", e) from e
        return self.costs

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        self._ranks = dp_size
        if self._first_balance:
            return logprob_multiple(self.config, dp_size, self.use_reference_policy)
        return super()._get_required_batch_multiple(dp_size)

    def _balance_batch(self, batch: host.Batch, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> host.Batch:
        self._decided = None
        if not self.methods:
            if self.settings.rewards:
                self._logged.append(weigh_rewards(batch, self.settings.rewards))
            return super()._balance_batch(batch, metrics, *args, **kwargs)
        self._selected = self._decisions().select(batch)
        self._first_balance = not self.use_critic
        try:
            return super()._balance_batch(self._selected.batch, metrics, *args, **kwargs)
        finally:
            self._first_balance = False

    def _decisions(self) -> Decisions:
        rows = self.config.data.train_batch_size * self._prompts.group_size // self.parameter_sync_step
        rewards, now = self.settings.rewards, (self._published, self._steps_since)
        return Decisions(self.methods, self.config, rewards, self.tokenizer, rows, *now)

    @property
    def _published(self) -> int:
        """The newest published weights: verl publishes at the end of every global step."""
        return self.global_steps - 1

    def _compute_old_log_prob(self, batch: host.Batch, metrics: dict[str, Any]) -> host.Batch:
        if self._snapshots is not None and self.local_trigger_step == 0:
            self._snapshots.keep(self._published)
        squares = bool(self.methods) and "sum_squared_probs" in self.methods.token_columns
        if squares:
            batch.extra_info[SUM_PI_SQUARED] = True  # verl's engine computes it when a batch asks
        batch = super()._compute_old_log_prob(batch, metrics)
        if squares:
            batch.extra_info.pop(SUM_PI_SQUARED, None)
            keep_sum_squared_probs(batch)
        if self._snapshots is not None and self._selected is not None:
            self._by_generating_weights(batch, self._selected)
        if self._selected is not None:
            complete_rollout_logprobs(batch, self._selected.unknown, metrics)
        return batch

    def _read_by_teacher(self, batch: host.Batch, selected: Selected) -> None:
        workers: Any = self
        itself = self.methods.teacher is None  # another model stands in the place of the reference
        if selected.teacher is None:  # each under its own prompt: that pass was made
            name = "old_log_probs" if itself else "ref_log_prob"
            put(batch, {TOKEN_COLUMNS["teacher_logprobs"]: fetch(batch, [name])[name]})
            return
        read_by_teacher(
            batch,
            selected.teacher,
            lambda prompt: self._chat.prompt(messages_of(prompt)),
            workers.actor_rollout_wg.compute_log_prob if itself else workers.ref_policy_wg.compute_ref_log_prob,
            float(self.config.actor_rollout_ref.rollout.temperature),
            logprob_multiple(self.config, self._ranks, self.use_reference_policy),
        )

    def _by_generating_weights(self, batch: host.Batch, selected: Selected) -> None:
        """Old log-probs of every token by the weights that generated it."""
        assert self._snapshots is not None and selected.versions is not None  # in `needs` of such a method
        multiple = logprob_multiple(self.config, self._ranks, False)
        logged = self._snapshots.recompute(batch, selected.versions, self._published, multiple)
        self._logged.append(logged)
        if logged["rl_plugins/version_lost"]:
            self.methods.warn_once(
                "Some tokens were generated by weights that are no longer kept (copies of weights are not part of a "
                "checkpoint). Their old log-probs are those of the newest weights; rl_plugins/version_lost is their "
                "share."
            )

    def _compute_advantage(self, batch: host.Batch, metrics: dict[str, Any]) -> host.Batch:
        if self._selected is not None and "teacher_logprobs" in self.methods.token_columns:
            self._read_by_teacher(batch, self._selected)
        batch = super()._compute_advantage(batch, metrics)
        if self._selected is None:
            self.costs.rows_trained_total += sum(not is_padding(tag) for tag in batch.tags)
            return batch
        decided = self._decisions().decide_advantages(batch, self._selected)
        self._selected, self._decided = None, decided
        self.costs.rows_trained_total += int(decided.decision.trained.sum())
        self._logged.append(dict(decided.metrics))
        trained = decided.decision.rollouts.subset(decided.decision.stays)
        self._ages.append(self._published - torch.stack([trained.newest_version, trained.version]))
        batch = decided.batch
        if decided.nothing:
            return batch
        batch = super()._balance_batch(batch, metrics)
        if "whole_groups" in self.methods.needs:
            self._keep_groups_whole(batch)
        clean_padding(batch, decided.columns)
        return batch

    def _keep_groups_whole(self, batch: host.Batch) -> None:
        actor = self.config.actor_rollout_ref.actor
        numbers = flat(fetch(batch, [GROUP])[GROUP]).long().tolist()
        group = [None if is_padding(tag) else n for tag, n in zip(batch.tags, numbers, strict=True)]
        batch.reorder(whole_group_order(group, actor.ppo_mini_batch_size * self._prompts.group_size, self._ranks))

    def _update_critic(self, batch: host.Batch, metrics: dict[str, Any]) -> host.Batch:
        if self._decided is not None and self._decided.nothing:
            return batch
        return super()._update_critic(batch, metrics)

    def _update_actor(self, batch: host.Batch, metrics: dict[str, Any]) -> host.Batch:
        if not self.methods.trains or (self._decided is not None and self._decided.nothing):
            return batch
        if self.methods:
            batch.extra_info[loss.PUBLISHED] = self._published
        batch = super()._update_actor(batch, metrics)
        if self.methods:
            self._steps_since = loss.take_steps(metrics)
            values = loss.take_metrics(metrics)
            self._skipped.count(self.methods, values.get(SKIPPED, 0.0))
            self.methods.stats = values
            self._logged.append({f"actor/{name}": value for name, value in values.items()})
            for watcher in self.methods.watchers:
                watcher.updated(None, ())
        return batch


def _register(name: str, trainer: type[PPOTrainer]) -> type[PPOTrainer]:
    """A trainer of verl with methods, under a name of ours; a name that is taken is an error."""
    body: dict[str, Any] = {
        "methods_mode": MODES[name],
        "__module__": __name__,
        "__doc__": f"{trainer.__name__} with methods.",
    }
    if not states_its_mode(PPOTrainer):  # verl 0.9.1 decides by the registered name; the twin is patches/verl/V9
        body["trainer_mode"] = property(lambda self: self.methods_mode, lambda self, value: None)
    return register_trainer(name)(type(f"Methods{trainer.__name__}", (MethodsTrainer, trainer), body))


TRAINERS = {
    "rl_plugins_sync": _register("rl_plugins_sync", PPOTrainerSync),
    "rl_plugins_colocate_async": _register("rl_plugins_colocate_async", PPOTrainerColocateAsync),
    "rl_plugins_separate_async": _register("rl_plugins_separate_async", PPOTrainerSeparateAsync),
}
MethodsSync, MethodsColocateAsync, MethodsSeparateAsync = TRAINERS.values()
