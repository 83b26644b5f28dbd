"""`GRPOTrainer` with methods: a mixin of small overrides over TRL's own trainer, each of which calls `super()`."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
import trl

from rl_plugins.errors import ConfigError
from rl_plugins.requests import Prompt
from rl_plugins.rollouts import Rows, Run
from rl_plugins.runtime.preflight import render_table
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.trl import facts, logs, loss
from rl_plugins.trl.batch import ROW_COLUMN
from rl_plugins.trl.checkpoint import MethodsCallback, read_state, write_state
from rl_plugins.trl.compat import Seams, moved_symbols, trl_version
from rl_plugins.trl.engine import TrlEngine
from rl_plugins.trl.evaluation import evaluation_view
from rl_plugins.trl.prompts import PROMPT_INDEX, NumberedDataset, fingerprint, has_numbers
from rl_plugins.trl.ranks import gather, on_driver
from rl_plugins.trl.step import GenerationStep

_Host: Any = object  # for the type checker: whatever trainer the mixin is put before


class MethodsMixin(_Host):  # type: ignore[misc]
    """Adds methods to a trainer of TRL that generates like GRPOTrainer: `class Mine(MethodsMixin, TheirTrainer)`.

    With `methods: []` every override only calls `super()`.

    Raises:
        ConfigError: on construction, before the model is loaded, for everything in the config that could not take
            effect or not be exact.
    """

    methods: MethodStack
    train_dataset: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        given = inspect.signature(super().__init__).bind(*args, **kwargs).arguments
        config = given.get("args")
        self.methods = build_stack(
            getattr(config, "methods", None), getattr(config, "method_params", None), getattr(config, "seed", 0)
        )
        self._generation_step: GenerationStep | None = None
        if not self.methods:
            super().__init__(*args, **kwargs)
            return
        host = next(c for c in type(self).__mro__ if c.__module__.startswith("trl."))
        moved = moved_symbols(host)
        if moved:
            raise ConfigError(
                f"TRL {trl_version()} moved what rl-plugins builds on: {'; '.join(moved)}. Install TRL 1.16, or update "
                f"rl-plugins."
            )
        self._seams = Seams.of(host)
        functions = given.get("reward_funcs")
        dataset = given.get("train_dataset")
        streaming = dataset is not None and not has_numbers(dataset)
        count = len(functions) if isinstance(functions, list) else int(functions is not None)
        environment = given.get("environment_factory")
        inputs = facts.Inputs(
            dataset=dataset,
            streaming=streaming,
            reward_functions=count + (2 if environment is not None else 0),
            rollout_func=given.get("rollout_func") is not None,
            tools=bool(given.get("tools")) or environment is not None,
        )
        assert config is not None
        self._method_options = facts.check(self.methods, config, inputs, self._seams)
        for name, value in self._method_options.items():
            setattr(config, name, value)
        self._fingerprint = fingerprint(dataset)
        self._resume_from: str | None = None
        self._started = False
        self._boundary_state: dict[str, Any] = {}
        self._live_inputs: dict[str, Any] | None = None
        self._live_tensors: dict[str, Any] | None = None
        config._methods_have_a_trainer = True
        try:
            super().__init__(*args, **kwargs)
        finally:
            config._methods_have_a_trainer = False
        self._methods_callback = MethodsCallback(self)
        self.add_callback(self._methods_callback)
        if self.methods.claimed("plan", "select") and self.aux_loss_enabled:
            self._refuse_inexact_loss(True)
        if "rollout_logprobs" in self.methods.needs:
            on_driver(self.accelerator, self._check_server_logprobs)
        if self.accelerator.is_main_process:
            print(self.describe_methods(), flush=True)

    def describe_methods(self) -> str:
        """The table of methods in effect, with host options they set or make meaningless."""
        text = render_table(self.methods, self._method_options)
        idle = facts.without_effect(self.methods, self.args)
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

    # ---- start, save, resume

    def _start_methods(self) -> None:
        """Once before the first step: `start` on the driver, then the state of the checkpoint."""
        if not self._started:
            rows = len(self.train_dataset) if has_numbers(self.train_dataset) else None
            if rows is not None and (problem := facts.too_few_prompts(self.args, rows)):
                raise ConfigError(problem)
            on_driver(self.accelerator, lambda: self.methods.start(self._run()))
            self._started = True
        if self._resume_from is not None:
            read_state(self, self._resume_from)
            self._resume_from = None

    def _run(self) -> Run:
        dataset = self.train_dataset
        sized = has_numbers(dataset)
        per_step = facts.optimizer_steps_per_generation(self.args)
        return Run(
            host="trl",
            host_version=trl_version(),
            dataset=dataset if sized else None,
            dataset_size=len(dataset) if sized else None,
            columns=tuple(getattr(dataset, "column_names", None) or ()),
            reward_names=tuple(self.reward_func_names),
            group_size=self.num_generations,
            total_steps=self.state.max_steps,
            total_batches=-(-self.state.max_steps // max(1, int(per_step))),
            max_completion_length=self.max_completion_length,
        )

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.methods:
            self._resume_from = checkpoint

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        if self.methods:
            write_state(self, trial)
        super()._save_checkpoint(model, trial)

    # ---- prompts

    def _set_signature_columns_if_needed(self) -> None:
        super()._set_signature_columns_if_needed()
        if self.methods and PROMPT_INDEX not in self._signature_columns:
            self._signature_columns.append(PROMPT_INDEX)

    def get_train_dataloader(self) -> Any:
        with self._numbered_dataset():
            return super().get_train_dataloader()

    @contextlib.contextmanager
    def _numbered_dataset(self) -> Iterator[None]:
        dataset: Any = self.train_dataset
        if self.methods and has_numbers(dataset):
            self.train_dataset = NumberedDataset(dataset)
        try:
            yield
        finally:
            self.train_dataset = dataset

    # ---- one generation batch

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        if not self.methods:
            return super()._generate_and_score_completions(inputs)
        if not self.model.training:
            with evaluation_view(self, inputs) as rows:
                out = super()._generate_and_score_completions(rows)
            logs.extend_own_columns(self, len(inputs) * self.accelerator.num_processes, {})
            return out
        if self.args.steps_per_generation * self.num_iterations > self.args.gradient_accumulation_steps:
            self._boundary_state = self.methods.state_dict(self._fingerprint)  # a last save may need it
        self._generation_step = step = GenerationStep(self, inputs)
        try:
            step.plan()
            with step.host_view() as rows:
                out = super()._generate_and_score_completions(rows)
            return step.finish(out)
        finally:
            self._generation_step = None

    def _generate(self, prompts: list[Any]) -> Any:
        generated = super()._generate(prompts)
        if self._generation_step is not None:
            self._generation_step.generated = generated
        return generated

    def _generate_single_turn(
        self, prompt_ids: Any, images: Any, multimodal_fields: Any, num_generations: int, *args: Any, **kwargs: Any
    ) -> Any:
        host = super()._generate_single_turn
        step = self._generation_step
        if step is None or not step.serving:
            return host(prompt_ids, images, multimodal_fields, num_generations, *args, **kwargs)
        return step.generate(host, prompt_ids, images, multimodal_fields, num_generations)

    def _program_engine(self, row_of: Callable[[Prompt], dict[str, Any]]) -> TrlEngine:
        """TRL's own generation and reward functions, for rollout programs."""
        return TrlEngine(self, super()._generate_single_turn, super()._calculate_rewards, row_of)

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Any:
        host = super()._calculate_rewards
        if self._generation_step is None:
            return host(inputs, prompts, completions, completion_ids_list)
        return self._generation_step.score(host, inputs, prompts, completions, completion_ids_list)

    def _transform_advantages(self, advantages: torch.Tensor) -> torch.Tensor:
        """Upstream seam (patches/trl/T2): decides before TRL logs and slices, if no per-token column is needed."""
        advantages = super()._transform_advantages(advantages)
        step = self._generation_step
        return advantages if step is None or step.columns_wanted else step.decide_in_host(advantages)

    # ---- one optimizer step

    def _prepare_inputs(self, generation_batch: Any) -> Any:
        inputs = super()._prepare_inputs(generation_batch)
        if self.methods and self.model.training and self._step % self.current_gradient_accumulation_steps == 0:
            if self.methods.claims["before_update"]:
                self._before_update()
            if "rlp_num_rows" in inputs and int(inputs["num_items_in_batch"]) == 0:
                self._methods_callback.lr_scale = 0.0  # nothing to learn from: AdamW would still move the weights
        return inputs

    def _before_update(self) -> None:
        """Row sums of the coming optimizer step over all ranks, to every method; columns into its micro-batches."""
        first = self._step % self.args.steps_per_generation
        window = self._buffered_inputs[first : first + self.current_gradient_accumulation_steps]
        parts = gather(self.accelerator, [self._row_sums(batch) for batch in window])
        sums = [s for part in parts for s in part]
        together = {k: torch.cat([s[k] for s in sums]) for k in sums[0]}
        live = together["length"] > 0
        inside = {k: v[live] for k, v in together.items()}
        names = ("group", "length", "logprobs", "old_logprobs", "rollout_logprobs")
        rows = Rows(
            **{k: v for k, v in inside.items() if k in names},
            columns={k.removeprefix(ROW_COLUMN): v for k, v in inside.items() if k.startswith(ROW_COLUMN)},
        )
        for m in self.methods.claims["before_update"]:
            update = self.methods.call("before_update", m, rows)
            if update is None:
                continue
            self._methods_callback.lr_scale *= float(update.lr_scale)
            for name, values in update.columns.items():
                if tuple(values.shape) != (len(rows.length),):
                    raise self.methods.refuse(m, "before_update", f"the column `{name}` needs one number per row.")
                full = torch.zeros(len(live), dtype=torch.float32)
                full[live] = values.float()
                start = sum(len(s["length"]) for part in parts[: self.accelerator.process_index] for s in part)
                for batch in window:
                    size = len(batch["completion_ids"])
                    batch[ROW_COLUMN + name] = full[start : start + size].to(batch["completion_ids"].device)
                    start += size
        if not self.accelerator.is_main_process:
            self.methods.metrics.take()  # every rank logged the same; one of them counts

    def _row_sums(self, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
        mask = batch["completion_mask"] * batch.get("tool_mask", 1)
        columns = {
            "old_logprobs": batch.get("old_per_token_logps"),
            "rollout_logprobs": batch.get("rlp_rollout_logprobs"),
        }
        if "current_logprobs" in self.methods.needs:
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            attention = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            with torch.no_grad():
                columns["logprobs"] = self._get_per_token_logps_and_entropies(
                    self.model, ids, attention, batch["completion_ids"].size(1)
                )[0]
        sums = {k: torch.where(mask > 0, v, 0.0).double().sum(1).cpu() for k, v in columns.items() if v is not None}
        own = {k: v.double().cpu() for k, v in batch.items() if k.startswith(ROW_COLUMN)}
        return {"group": batch["rlp_group"].cpu(), "length": mask.sum(1).cpu(), **sums, **own}

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> torch.Tensor:
        host = super()._compute_loss
        if not self.methods or not self.model.training:
            return host(model, inputs)
        if not self.methods.trains:  # a loss without any parameter: no gradient, so no optimizer acts on anything
            return torch.zeros((), device=self.accelerator.device, requires_grad=True)
        return loss.compute_loss(self, host, model, inputs)

    def _transform_per_token_loss(
        self,
        per_token_loss: torch.Tensor,
        per_token_logps: torch.Tensor,
        log_ratio: torch.Tensor,
        mask: torch.Tensor,
        inputs: Any,
    ) -> torch.Tensor:
        """Upstream seam (patches/trl/T3): the method's surrogate in the place of TRL's."""
        result = super()._transform_per_token_loss(per_token_loss, per_token_logps, log_ratio, mask, inputs)
        if self._live_inputs is None or self._live_tensors is None:
            return result
        return loss.policy_loss(self, loss.make_terms(self, self._live_inputs, self._live_tensors))

    def _refuse_inexact_loss(self, rows_left: bool) -> None:
        """Raises ConfigError if rows leave under a loss that cannot be rescaled to those that stay."""
        if not rows_left:
            return
        if self.loss_type == "bnpo":
            raise ConfigError(
                "Rows left the batch under loss_type='bnpo', whose result depends on how rows are split into "
                "micro-batches and cannot be exact then. Use loss_type='dapo'."
            )
        if self.loss_type in facts.ROW_LOSSES and not self._seams.select_completions:
            for on, what in (
                (self._entropy_bonus_enabled, "an entropy bonus"),
                (self.aux_loss_enabled, "the auxiliary loss of a mixture of experts"),
            ):
                if on:
                    raise ConfigError(facts.row_loss_problem(self.methods, self.loss_type, what))


class GRPOTrainer(MethodsMixin, trl.GRPOTrainer):  # type: ignore[misc]
    """`trl.GRPOTrainer` that runs the methods its config names."""


__all__ = ["GRPOTrainer", "MethodsMixin"]
