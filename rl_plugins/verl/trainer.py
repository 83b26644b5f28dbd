"""verl's V1 trainers with methods: one mixin over each of them, registered under a name of its own.

Every override calls `super()`. What belongs to one batch is in batch.py, to the prompts in prompts.py, to the loss in
loss.py.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import ray
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import PPOTrainerColocateAsync, PPOTrainerSeparateAsync, PPOTrainerSync, register_trainer
from verl.trainer.ppo.v1.trainer_base import PPOTrainer
from verl.utils.config import omega_conf_to_dataclass

from rl_plugins.errors import ConfigError, MethodError, StateError
from rl_plugins.rollouts import GroupSoFar, Plan, PlanRow, Run
from rl_plugins.runtime.plan import first_plan, next_plan
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.verl import facts, loss, start
from rl_plugins.verl.batch import (
    MethodsBatch,
    fetch,
    is_padding,
    logprob_multiple,
    whole_group_order,
)
from rl_plugins.verl.compat import moved_symbols, states_its_mode, untested_allowed, verl_version
from rl_plugins.verl.config import MODES, read_settings
from rl_plugins.verl.evaluation import PlannedBatches, planning
from rl_plugins.verl.processes import Watch, confirm, died
from rl_plugins.verl.prompts import COLUMN, PLANNED_AGENT, PROMPT_INDEX, PromptBatches, fingerprint, number_rows
from rl_plugins.verl.rows import GROUP, flat, plain, read_rollouts, split

MAX_ROUNDS = 64
POLL_INTERVAL = 0.2  # seconds; verl's 2.0 would be most of a short step


_Host: Any = object  # stands for the trainer of verl that a subclass adds


class MethodsTrainer(_Host):
    """Mixin over a trainer of verl. Without methods every override hands on to the host.

    Attributes:
        methods: the stack; the only copy of the methods' state.
        methods_mode: the mode of verl that is followed.
    """

    methods_mode = "sync"
    val_dataloader: Any

    def __init__(self, config: Any) -> None:
        moved = moved_symbols(type(self))
        if moved and not untested_allowed():
            raise ConfigError(
                f"verl {verl_version()} is not as this version of rl-plugins expects it: {'; '.join(moved)}. Install a "
                f"version it was tested with."
            )
        settings = read_settings(config)
        assert settings is not None  # `start.prepare` refuses this trainer without the node
        self.settings = settings
        self.methods = settings.stack()
        self._batch: MethodsBatch | None = None
        self._first_balance = self._nothing_left = False
        self._logged: list[dict[str, float]] = []
        self._submitted: dict[str, PlanRow] = {}  # uid -> plan row, of the step that is generated
        self._planned_prompts = self._trained_rows = 0
        if self.methods:
            start.apply(self.methods, settings, config)
        super().__init__(config)
        if self.methods:
            chosen = config.trainer.v1.sampler.get("poll_interval")  # a key of patches/verl/V11; 2.0 is its default
            self.replay_buffer.poll_interval = POLL_INTERVAL if chosen in (None, 2.0) else chosen
            self._host_sample = self.replay_buffer.sample
            self.replay_buffer.sample = self._sample

    # ---- start

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        if self.methods:
            number_rows(self.train_dataset)
            self._prompts = PromptBatches(self.train_dataset, self.config)
            self._fingerprint = fingerprint(self.train_dataset)

    def fit(self, agent_loop_manager: Any) -> None:
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
            watch = Watch({f"agent loop {i}": w for i, w in enumerate(agent_loop_manager.agent_loop_workers)})
            self._watch = watch
            wait = self.replay_buffer._wait_for_next_poll

            def watched_wait(*args: Any, **kwargs: Any) -> Any:
                watch.check()
                return wait(*args, **kwargs)

            self.replay_buffer._wait_for_next_poll = watched_wait
        super().fit(agent_loop_manager)

    def _run(self) -> Run:
        batches = self.total_training_steps * self.parameter_sync_step
        read = facts.Reader(self.config)
        return Run(
            host="verl",
            host_version=verl_version(),
            dataset=self.train_dataset,
            dataset_size=len(self.train_dataset),
            columns=tuple(facts.dataset_columns(read) or ()),
            reward_names=tuple(self.settings.rewards) or ("score",),
            group_size=self.config.actor_rollout_ref.rollout.n,
            total_steps=batches * read.optimizer_steps_per_batch,
            total_batches=batches,
            max_completion_length=self.config.data.max_response_length,
        )

    # ---- state

    def _load_checkpoint(self) -> None:
        if self.methods:
            self.methods.start(self._run())
        super()._load_checkpoint()
        if self.methods and self.global_steps:
            trainer = self.config.trainer
            folder = os.path.join(trainer.default_local_dir, f"global_step_{self.global_steps}")
            self._load_state(trainer.resume_from_path if trainer.resume_mode == "resume_path" else folder)

    def _load_state(self, folder: str) -> None:
        saved = load_state(folder)
        if saved is None:
            stateful = [m.name for m in self.methods.methods if m._state]
            if stateful:
                raise StateError(
                    f"The checkpoint {folder} holds no state of methods, and {', '.join(stateful)} cannot resume "
                    f"without theirs. To go on from its weights, start a new run with that model."
                )
            self.methods.batch = self.global_steps * self.parameter_sync_step
            return
        self.methods.load_state_dict(saved, self._fingerprint)

    def _save_checkpoint(self) -> None:
        if self.methods:  # first: verl's last act is the tracker file that makes the checkpoint findable
            folder = os.path.join(self.config.trainer.default_local_dir, f"global_step_{self.global_steps}")
            os.makedirs(folder, exist_ok=True)
            save_state(folder, self.methods.state_dict(self._fingerprint))
        super()._save_checkpoint()

    # ---- what is generated

    def _next_train_batch(self, num_prompts: int | None = None) -> Any:
        batch = super()._next_train_batch(num_prompts)
        if not self.methods:
            return batch
        from verl.utils import tensordict_utils as tu

        proposal = [int(i) for i in batch[PROMPT_INDEX]]
        plan = first_plan(
            self.methods,
            proposal,
            self._prompts.group_size,
            len(proposal) * self._prompts.group_size,
            len(self.train_dataset),
            self.train_dataset,
        )
        if self.methods_mode != "sync":
            self._check_async_plan(plan, len(proposal))
        planned = self._build(plan.rows)
        uids = dict(zip(map(str, planned["uid"]), plan.rows, strict=True))
        if num_prompts is None:
            self._submitted, self._planned_prompts, self._trained_rows = uids, len(uids), plan.trained
        else:  # verl refills what it evicted
            self._submitted |= uids
        tu.assign_non_tensor_data(planned, "global_steps", self.global_steps)
        return planned

    def _build(self, rows: Sequence[PlanRow], wave: str | None = None, round_: int = 0) -> Any:
        """Prompts of a plan as verl's batch."""
        self._prompts.by_program = self.methods.claimed("rollout")
        return self._prompts.build(rows, wave, round_, self.methods.batch, self.methods.draw)

    def _check_async_plan(self, plan: Plan, prompts: int) -> None:
        size = self._prompts.group_size
        if len(plan.rows) == prompts and all(r.n == size for r in plan.rows):
            return
        names = ", ".join(f"`{m.name}`" for m in self.methods.claims["plan"])
        raise MethodError(
            f"{names} plans {len(plan.rows)} prompts with {sorted({r.n for r in plan.rows})} trained rollouts each, "
            f"where {prompts} with {size} were asked for. {self.methods_mode} takes batches out of a buffer of groups "
            f"and needs one group of {size} per prompt (`spare` rollouts may be added). Use "
            f"trainer.v1.trainer_mode=rl_plugins_sync."
        )

    def _sample(self, global_steps: int, partition_id: str, batch_size: int) -> tuple[KVBatchMeta, dict[str, Any]]:
        """verl's sampling, of as many prompts as were planned; methods with rounds ask for more until they have all."""
        if partition_id == "train" and self.methods and self.methods_mode == "sync":
            batch_size = self._planned_prompts
        try:
            batch, metrics = self._host_sample(
                global_steps=global_steps, partition_id=partition_id, batch_size=batch_size
            )
        finally:  # verl goes on without a prompt that failed, or ends with an error that does not say why
            if self.methods.claimed("rollout"):
                self._watch.check(wait=True)
        if partition_id != "train" or not self.methods:
            return batch, metrics
        if any(m.rounds for m in self.methods.methods):
            batch = self._rounds(batch, global_steps)
        self._count_missing(batch)
        return batch, metrics

    def _rounds(self, batch: KVBatchMeta, global_steps: int) -> KVBatchMeta:
        from verl.utils import tensordict_utils as tu

        first = dict(self._submitted)
        for round_ in range(1, MAX_ROUNDS + 1):
            rows = fetch(batch)
            rollouts = read_rollouts(
                rows, batch.keys, batch.tags, None, self.settings.rewards, self.tokenizer, self.methods.batch, 0
            )
            group = [n["group"] for n in plain(rows[COLUMN])]
            planned = {row.group: row for row in reversed(list(first.values()))}
            so_far = tuple(
                GroupSoFar(row, rollouts.reward[[i for i, g in enumerate(group) if g == row.group]])
                for row in sorted(planned.values(), key=lambda r: r.group)
            )
            budget = self.config.data.train_batch_size * self._prompts.group_size - self._trained_rows
            plan = next_plan(
                self.methods, Plan((), self._prompts.group_size, budget, round_, so_far, self.methods.batch)
            )
            if not plan.rows:
                return batch
            wave = next(n["wave"] for n in plain(rows[COLUMN]))
            more = self._build(plan.rows, wave, round_)
            tu.assign_non_tensor_data(more, "global_steps", self.global_steps)
            uids = dict(zip(map(str, more["uid"]), plan.rows, strict=True))
            self._submitted |= uids
            first |= uids
            self._trained_rows += plan.trained
            self._submit_batch_to_rollout(more)
            added, _ = self._host_sample(global_steps=global_steps, partition_id="train", batch_size=len(plan.rows))
            batch = KVBatchMeta(
                partition_id=batch.partition_id,
                keys=[*batch.keys, *added.keys],
                tags=[*batch.tags, *added.tags],
                extra_info=batch.extra_info,
            )
        names = ", ".join(f"`{m.name}`" for m in self.methods.methods if m.rounds)
        raise MethodError(f"{names} asked for more rollouts in {MAX_ROUNDS} rounds of one step without an end.")

    def _count_missing(self, batch: KVBatchMeta) -> None:
        """verl goes on when agent loops fail; completions a plan gave must not be lost that way."""
        if self.methods_mode != "sync" or self.config.algorithm.filter_groups.enable:
            return  # what is missing was evicted
        if self.methods.claimed("rollout"):
            return  # a program may make fewer, and one that fails ends the run
        made: dict[str, set[int]] = {uid: set() for uid in self._submitted}
        for key in batch.keys:
            uid, session, _ = split(key)
            made.setdefault(uid, set()).add(session)
        missing = sum(max(0, row.n + row.spare - len(made[uid])) for uid, row in self._submitted.items())
        special = [
            row.prompt_index
            for uid, row in self._submitted.items()
            if (row.given or row.prefix) and len(made[uid]) < row.n + row.spare
        ]
        if special:
            raise MethodError(
                f"The agent loop `{PLANNED_AGENT}` lost completions that the plan gives for the prompts {special[:8]}; "
                f"the reason stands in the log of the agent-loop workers."
            )
        if missing:
            self.methods.warn_once(f"{missing} rollouts of this step are missing: their agent loops failed.")

    def _submit_batch_to_rollout(self, batch: Any) -> int:
        try:
            return super()._submit_batch_to_rollout(batch)
        except ray.exceptions.RayActorError as e:
            raise died("agent loop", e) from e

    def _validate(self) -> Any:
        if not planning(self.methods):
            return super()._validate()
        loader, n = self.val_dataloader, self.config.actor_rollout_ref.rollout.val_kwargs.n
        self.val_dataloader = PlannedBatches(loader, self.methods, self._prompts, n)
        try:
            return super()._validate()
        finally:
            self.val_dataloader = loader

    # ---- one batch

    def step(self, metrics: dict[str, Any], timing_raw: dict[str, Any]) -> KVBatchMeta:
        self._logged = []
        batch = super().step(metrics, timing_raw)
        # verl would reduce values by what their names contain ("min" of "minpro"); these are means over the batches
        for name in sorted({n for logged in self._logged for n in logged}):
            values = [logged[name] for logged in self._logged if name in logged]
            metrics[name] = sum(values) / len(values)
        return batch

    def _get_required_batch_multiple(self, dp_size: int) -> int:
        if self._first_balance:
            return logprob_multiple(self.config, dp_size, self.use_reference_policy)
        return super()._get_required_batch_multiple(dp_size)

    def _balance_batch(self, batch: KVBatchMeta, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> KVBatchMeta:
        if not self.methods:
            return super()._balance_batch(batch, metrics, *args, **kwargs)
        rows = self.config.data.train_batch_size * self._prompts.group_size // self.parameter_sync_step
        self._batch = MethodsBatch(
            self.methods, self.config, dict(self.settings.rewards), self.tokenizer, rows, self.total_training_steps
        )
        batch = self._batch.select(batch)
        self._first_balance = not self.use_critic
        try:
            return super()._balance_batch(batch, metrics, *args, **kwargs)
        finally:
            self._first_balance = False

    def _compute_old_log_prob(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_old_log_prob(batch, metrics)
        if self._batch is not None:
            self._batch.complete_rollout_logprobs(batch, metrics)
        return batch

    def _compute_advantage(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        batch = super()._compute_advantage(batch, metrics)
        if self._batch is None:
            return batch
        batch = self._batch.settle(batch)
        self._nothing_left = self._batch.nothing
        if self._nothing_left:
            names = ", ".join(f"`{n}`" for n in self.methods.names)
            self.methods.warn_once(f"Every row of a batch left ({names}): no optimizer step was made for it.")
        else:
            batch = super()._balance_batch(batch, metrics)
            if any(m.whole_groups for m in self.methods.methods):
                self._keep_groups_whole(batch)
            self._batch.clean_padding(batch)
        self._logged.append(self._batch.metrics())
        self._batch = None
        return batch

    def _keep_groups_whole(self, batch: KVBatchMeta) -> None:
        actor = self.config.actor_rollout_ref.actor
        numbers = flat(fetch(batch, [GROUP])[GROUP]).long().tolist()
        group = [None if is_padding(tag) else n for tag, n in zip(batch.tags, numbers, strict=True)]
        ranks = max(self.actor_rollout_wg._dispatch_info["actor"]) + 1
        batch.reorder(whole_group_order(group, actor.ppo_mini_batch_size * self._prompts.group_size, ranks))

    def _update_actor(self, batch: KVBatchMeta, metrics: dict[str, Any]) -> KVBatchMeta:
        if not self.methods.trains or self._nothing_left:
            return batch
        batch = super()._update_actor(batch, metrics)
        if self.methods:
            values = loss.take_metrics(metrics)
            self.methods.stats = values
            self._logged.append({f"actor/{name}": value for name, value in values.items()})
        return batch


def _register(name: str, host: type[PPOTrainer]) -> type[PPOTrainer]:
    """A trainer of verl with methods, under a name of ours; a name that is taken is an error."""
    body: dict[str, Any] = {
        "methods_mode": MODES[name],
        "__module__": __name__,
        "__doc__": f"{host.__name__} with methods.",
    }
    if not states_its_mode(PPOTrainer):  # verl 0.9.1 decides by the registered name; the twin is patches/verl/V9
        body["trainer_mode"] = property(lambda self: self.methods_mode, lambda self, value: None)
    return register_trainer(name)(type(f"Methods{host.__name__}", (MethodsTrainer, host), body))


MethodsSync = _register("rl_plugins_sync", PPOTrainerSync)
MethodsColocateAsync = _register("rl_plugins_colocate_async", PPOTrainerColocateAsync)
MethodsSeparateAsync = _register("rl_plugins_separate_async", PPOTrainerSeparateAsync)
TRAINERS = {
    "rl_plugins_sync": MethodsSync,
    "rl_plugins_colocate_async": MethodsColocateAsync,
    "rl_plugins_separate_async": MethodsSeparateAsync,
}
