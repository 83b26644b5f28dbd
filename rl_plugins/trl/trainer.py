"""`GRPOTrainer` with methods: a mixin of small overrides over TRL's own trainer, each of which calls `super()`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

from torch import Tensor
from transformers import TrainingArguments
from trl.trainer.grpo_trainer import GRPOTrainer as HostTrainer

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.requests import Prompt
from rl_plugins.runtime import update
from rl_plugins.runtime.costs import Costs, Meter
from rl_plugins.runtime.fingerprint import fingerprint
from rl_plugins.runtime.preflight import HostCapabilities, render_table
from rl_plugins.runtime.ranks import on_driver
from rl_plugins.runtime.reward_errors import MASK
from rl_plugins.runtime.stack import MAX_UNREWARDED_BATCHES, build_stack
from rl_plugins.runtime.trace import trace_of
from rl_plugins.tools.heads import positions_by_mask
from rl_plugins.trl import capabilities, hosts, logs
from rl_plugins.trl.changes import arguments_of, changed, more_head_outputs
from rl_plugins.trl.checkpoint import MethodsCallback
from rl_plugins.trl.compat import Seams, check_names
from rl_plugins.trl.generation import batches, costs
from rl_plugins.trl.generation.columns import columns_wanted
from rl_plugins.trl.generation.engine import TrlEngine
from rl_plugins.trl.generation.evaluation import evaluation_view
from rl_plugins.trl.generation.precision import CheapRollouts, rollouts_text
from rl_plugins.trl.generation.prompts import PROMPT_INDEX, NumberedDataset
from rl_plugins.trl.generation.rewards import masking, noted_steps, with_steps
from rl_plugins.trl.generation.serving import completions, rewards_of, with_observed
from rl_plugins.trl.generation.teacher import load_teacher
from rl_plugins.trl.generation.work import GeneratedWork, ScoredWork, Work
from rl_plugins.trl.host import DatasetRow, HostBatch, HostRows, has_numbers
from rl_plugins.trl.loss import micro_batch
from rl_plugins.trl.loss.updates import UpdatesSeen
from rl_plugins.trl.saved import CostsCallback, note_costs
from rl_plugins.trl.stateful import StatefulMixin


class MethodsMixin(StatefulMixin):
    """Adds methods to a trainer of TRL that is a GRPOTrainer: `class Mine(MethodsMixin, TheirTrainer)`.

    With `methods: []` every override only calls `super()`, whatever trainer of TRL it stands before.

    Class attributes a trainer may set:
        loss_like: for a trainer with a loss of its own: the `loss_type` of TRL whose average over rows and tokens its
            loss has ("grpo": mean over the rows of a micro-batch), or "host" where it calls TRL's. Without it methods
            that take out rows or touch the surrogate are refused.

    Raises:
        ConfigError: on construction, before the model is loaded, for everything in the config that could not take
            effect or not be exact, and for trainers that serve no methods.
    """

    loss_like: ClassVar[str | None] = None
    train_dataset: Any
    batch_phase: Work | GeneratedWork | None = None  # of the batch that is being made
    _loss_pass: micro_batch.LossPass | None = None
    _counts_costs = False
    costs: Costs
    meter: Meter
    _nothing_trained = False  # in the optimizer step that is being made
    cheap_rollouts: CheapRollouts | None = None
    updates_seen: UpdatesSeen | None = None
    teacher: Any = None  # a model, where a method names one

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = next((x for x in (*args, *kwargs.values()) if isinstance(x, TrainingArguments)), None)
        named = bool(getattr(config, "methods", None) or getattr(config, "trace", None))
        if named:
            hosts.check_served(type(self))
        if named or (config is None and isinstance(self, HostTrainer)):  # a constructor may make the config itself
            with arguments_of(HostTrainer, self, self.before_host):
                super().__init__(*args, **kwargs)
        else:
            super().__init__(*args, **kwargs)
        if self.methods or getattr(self.args, "count_costs", False):
            self._counts_costs, self.costs, self.meter = True, Costs(), Meter()
        if not self.methods:
            if named:
                raise ConfigError(
                    f"The config names methods, and the constructor of {type(self).__name__} did not hand it to "
                    f"that of trl.GRPOTrainer, so nothing of it could be checked. Pass it on as `args`."
                )
            if self._counts_costs:
                self.add_callback(CostsCallback(self))
            return
        self.add_callback(self._methods_callback)
        self.updates_seen = UpdatesSeen(self) if self.methods.watchers else None
        if self.args.on_reward_error == MASK:
            given = zip(self.reward_funcs, self.reward_func_names, strict=True)
            self.reward_funcs: list[Any] = [masking(function, name) for function, name in given]
        if "step_rewards" in self.methods.needs:
            given = zip(self.reward_funcs, self.reward_func_names, strict=True)
            self.reward_funcs = [with_steps(function, name) for function, name in given]
        positions_by_mask(self.model)
        if self.aux_loss_enabled and capabilities.droppers(self.methods):
            capabilities.refuse_inexact_loss(self)
        if self.args.rollout_precision != "policy":
            self.cheap_rollouts = CheapRollouts(self)
        if self.methods.teacher is not None:
            self.teacher = load_teacher(self, self.methods.teacher)
        if "rollout_logprobs" in self.methods.needs:
            on_driver(self.accelerator, self._check_server_logprobs)
        if self.accelerator.is_main_process:
            print(self.describe_methods(), flush=True)

    def before_host(self, given: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
        """Everything that is checked before TRL's own constructor loads the model.

        Args:
            given: the arguments it was called with, whatever the constructors before it made of theirs.

        Returns:
            In what it runs.
        """
        config = given.get("args")
        self.methods = build_stack(
            getattr(config, "methods", None),
            getattr(config, "method_params", None),
            getattr(config, "seed", 0),
            getattr(config, "max_unrewarded_batches", MAX_UNREWARDED_BATCHES),
            trace_of(getattr(config, "trace", None), "trace", str(getattr(config, "output_dir", ""))),
            refuse=False,
        )
        if not self.methods:
            return contextlib.nullcontext()
        assert config is not None
        host = next(c for c in type(self).__mro__ if c.__module__.startswith("trl."))
        check_names(host)
        self.host_loss = hosts.loss_of(type(self), config, MethodsMixin)
        self.seams = Seams(False, False) if self.host_loss.own else Seams.of(host)
        dataset = given.get("train_dataset")
        environment = given.get("environment_factory") is not None
        names = capabilities.reward_names(given.get("reward_funcs"))
        known = capabilities.KnownRun(
            args=config,
            dataset=dataset,
            size=len(dataset) if dataset is not None and has_numbers(dataset) else None,
            rewards=names + ("reward",) * 2 * environment,  # an environment may bring some of its own
            rollout_func=given.get("rollout_func") is not None,
            tools=bool(given.get("tools")) or environment,
            own_loss=self.host_loss,
        )
        if "chat_template" in self.methods.needs or known.has_messages:
            model, options = given.get("model"), config.model_init_kwargs or {}
            name = model if isinstance(model, str) else capabilities.model_name(model)
            template = capabilities.template_of(name, given.get("processing_class"), options.get("revision"))
            known = replace(known, model=name, template=template)
        self._method_options = capabilities.check(self.methods, known, self.seams, self.capabilities_of(known))
        for name, value in self._method_options.items():
            setattr(config, name, value)
        self._methods_callback = MethodsCallback(self, fingerprint(dataset))
        inside = contextlib.ExitStack()
        inside.enter_context(changed(config, has_trainer=True))
        if "sum_squared_probs" in self.methods.needs:
            inside.enter_context(more_head_outputs())
        return inside

    def capabilities_of(self, known: capabilities.KnownRun) -> HostCapabilities:
        """What the run offers; a trainer with another way to sample or to take log-probs offers less."""
        return capabilities.trl_capabilities(self.methods, known)

    def describe_methods(self) -> str:
        """The table of methods in effect, with host options they set or make meaningless."""
        text = render_table(self.methods, self._method_options)
        if self.cheap_rollouts is not None:
            text += f"\n  rollouts: {rollouts_text(self.methods, self.args)}"
        idle = capabilities.without_effect(self.methods, self.args, self.host_loss)
        return text + (f"\n  host options without effect: {', '.join(idle)}" if idle else "")

    def _check_server_logprobs(self) -> None:
        """TRL warns of a server that reports raw log-probs only while its own correction is on."""
        if not self.use_vllm or self.vllm_mode != "server" or self.temperature == 1.0:
            return
        mode = self.vllm_generation.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise ConfigError(
                f"The methods need log-probs of what was sampled, but the vLLM server runs with --logprobs-mode "
                f"{mode}, which leaves out the temperature ({self.temperature}). Restart it with --logprobs-mode "
                f"processed_logprobs."
            )

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        if self._counts_costs and not self.methods:
            note_costs(self.state, self.costs)
        super().save_model(*args, **kwargs)

    # ---- prompts

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self.methods and PROMPT_INDEX not in self._signature_columns:
            self._signature_columns.append(PROMPT_INDEX)

    def get_train_dataloader(self) -> Any:
        dataset: Any = self.train_dataset
        if not self.methods or not has_numbers(dataset):
            return super().get_train_dataloader()
        with changed(self, train_dataset=NumberedDataset(dataset)):
            return super().get_train_dataloader()

    # ---- one generation batch

    def _generate_and_score_completions(self, inputs: list[DatasetRow]) -> HostBatch:
        host = super()._generate_and_score_completions
        if not self.methods:
            batch_of_host: HostBatch = host(inputs)
            if self._counts_costs and self.model.training:
                costs.book(self, len(inputs) * self.accelerator.num_processes)
            return batch_of_host
        if not self.model.training:
            with evaluation_view(self, inputs) as rows:
                out: HostBatch = host(rows)
            logs.extend_own_columns(self, len(inputs) * self.accelerator.num_processes, {})
            return out
        self._methods_callback.batch_begins()
        out, batch = batches.make_batch(self, inputs, host)
        costs.book(self, batch.rows_trained)
        return out

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        work = self.batch_phase if isinstance(self.batch_phase, Work) else None
        made_here = work is None or not work.by_program  # rows of programs were counted when those ran
        counts = self._counts_costs and self.model.training and made_here
        with contextlib.ExitStack() as inside:
            if self.cheap_rollouts is not None and self.model.training and made_here:
                inside.enter_context(self.cheap_rollouts.serving())
            if counts:
                inside.enter_context(costs.engine_counted(self))
            generated = super()._generate(*args, **kwargs)
        if counts:
            rows = HostRows.of(generated).ids
            self.meter.costs.rows_made += len(rows) if work is None else sum(row.asked for row in work.mine)
        if work is not None:
            generated = with_observed(work, generated)
            self.batch_phase = GeneratedWork(work, HostRows.of(generated))
        return generated

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        host, work = super()._generate_single_turn, self.batch_phase
        if self.cheap_rollouts is not None:
            host = self.cheap_rollouts.with_logprobs(host)
        if not isinstance(work, Work) or work.by_program or work.served:
            return host(*args, **kwargs)
        self.batch_phase = replace(work, served=True)
        return completions(self, work, host, *args, **kwargs)

    def rollout_generate(self, model: Any) -> Any:
        """The `generate` that makes rollouts of programs: the policy's, or that of its cheap copy in training."""
        cheap = self.cheap_rollouts is not None and self.model.training
        return self.cheap_rollouts.generate() if cheap else model.generate  # type: ignore[union-attr]

    def program_engine(self, row_of: Callable[[Prompt], DatasetRow]) -> TrlEngine:
        """TRL's own generation and reward functions, for rollout programs."""
        generate, score = super()._generate_single_turn, super()._calculate_rewards
        meter = self.meter if self.model.training else Meter()  # evaluation costs apart
        return TrlEngine(self, generate, score, row_of, meter)

    def _calculate_rewards(self, *columns: Any, **named: Any) -> Any:
        host, made = super()._calculate_rewards, self.batch_phase
        if not isinstance(made, GeneratedWork):
            return host(*columns, **named)
        rewards = rewards_of(self, made.work, host, *columns, **named)
        steps = noted_steps(self, made.work, rewards) if "step_rewards" in self.methods.needs else None
        self.batch_phase = ScoredWork(made.work, made.rows, rewards, steps)
        return rewards

    def _transform_advantages(self, advantages: Tensor) -> Tensor:
        """Upstream seam (patches/trl/T2): decides before TRL logs and slices, if no per-token column is needed."""
        advantages = super()._transform_advantages(advantages)
        scored = self.batch_phase
        if not isinstance(scored, ScoredWork) or columns_wanted(self.methods):
            return advantages
        self.batch_phase = batch = batches.decided_in_host(self, scored, advantages)
        return batch.advantages(advantages)

    # ---- one optimizer step

    def compute_loss(self, model: Any, inputs: HostBatch, *args: Any, **kwargs: Any) -> Any:
        host = super().compute_loss
        if not self.methods or not self.model.training:
            return host(model, inputs, *args, **kwargs)
        if self._step % self.current_gradient_accumulation_steps == 0:
            self._nothing_trained = not self.methods.trains or micro_batch.nothing_trained(self, inputs)
            self._methods_callback.idle = self._nothing_trained
            if self.methods.claims["before_update"] and not self._nothing_trained:
                self._methods_callback.lr_scale *= micro_batch.before_update(self)
        if self._nothing_trained:
            return micro_batch.no_loss(self)
        seam = self.seams.transform_per_token_loss and self.methods.aggregation == "host"
        self._loss_pass = micro_batch.LossPass(inputs, bool(self.methods.claims["policy_loss"]) and seam)
        try:
            value = micro_batch.compute_loss(self, lambda *given: host(*given, *args, **kwargs), model, self._loss_pass)
            if self.updates_seen is not None and self.updates_seen.wants_ratios:
                self.updates_seen.saw_loss(inputs, self._loss_pass.logprobs)
            return value
        finally:
            self._loss_pass = None

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        if self._loss_pass is not None:
            self._loss_pass.saw(result[0], result[1])
        return result

    def get_high_entropy_mask(self, *args: Any, **kwargs: Any) -> Any:
        mask = super().get_high_entropy_mask(*args, **kwargs)
        if self._loss_pass is not None:
            self._loss_pass.entropy_mask = mask
        return mask

    def _transform_per_token_loss(
        self, per_token_loss: Tensor, per_token_logps: Tensor, log_ratio: Tensor, mask: Tensor, inputs: Any
    ) -> Tensor:
        """Upstream seam (patches/trl/T3): the method's surrogate in the place of TRL's."""
        result: Tensor = super()._transform_per_token_loss(per_token_loss, per_token_logps, log_ratio, mask, inputs)
        if self._loss_pass is None or not self._loss_pass.through_seam:
            return result
        return update.surrogate(self.methods, self._loss_pass.terms(self))


class GRPOTrainer(MethodsMixin, HostTrainer):
    """`trl.GRPOTrainer` that runs the methods its config names."""


__all__ = ["GRPOTrainer", "MethodsMixin"]
