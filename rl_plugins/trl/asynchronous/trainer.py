"""`AsyncGRPOTrainer` with methods: a mixin of small overrides over TRL's own trainer, each of which calls `super()`."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from transformers import TrainingArguments
from trl.experimental.async_grpo import AsyncGRPOTrainer as HostTrainer
from trl.experimental.async_grpo import async_grpo_trainer
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.rollouts import Run
from rl_plugins.runtime.fingerprint import fingerprint
from rl_plugins.runtime.preflight import render_table
from rl_plugins.runtime.ranks import on_driver
from rl_plugins.runtime.resume import resume
from rl_plugins.runtime.stack import build_stack
from rl_plugins.trl import logs
from rl_plugins.trl.asynchronous import capabilities, loss
from rl_plugins.trl.asynchronous.driver import Deciding, LastSeen
from rl_plugins.trl.asynchronous.packing import ColumnsCollator
from rl_plugins.trl.asynchronous.worker import GenerateWorker, RowSample
from rl_plugins.trl.changes import arguments_of, changed
from rl_plugins.trl.checkpoint import RunCallback
from rl_plugins.trl.compat import ASYNC_TRAINER, check_names
from rl_plugins.trl.host import has_numbers
from rl_plugins.trl.saved import is_marked
from rl_plugins.trl.stateful import StatefulMixin

SAMPLED = ("old_logprobs", "rollout_logprobs")


class AsyncMethodsMixin(StatefulMixin):
    """Adds methods to TRL's asynchronous trainer: `class Mine(AsyncMethodsMixin, TheirAsyncTrainer)`.

    With `methods: []` every override only calls `super()`.

    Raises:
        ConfigError: on construction, before the model is loaded, for everything in the config that could not take
            effect or not be exact.
    """

    _methods_callback: AsyncCallback
    _driver: Deciding | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        config = next((x for x in (*args, *kwargs.values()) if isinstance(x, TrainingArguments)), None)
        if not getattr(config, "methods", None):
            super().__init__(*args, **kwargs)
            return
        with arguments_of(HostTrainer, self, self.before_host):
            super().__init__(*args, **kwargs)
        self.add_callback(self._methods_callback)
        if self.accelerator.is_main_process:
            print(render_table(self.methods, self._method_options), flush=True)

    def before_host(self, arguments: Mapping[str, Any]) -> contextlib.AbstractContextManager[Any]:
        """Everything that is checked before TRL's own constructor loads the model.

        Args:
            arguments: it was called with.

        Returns:
            In what it runs.
        """
        given = capabilities.KnownAsync.of(arguments)
        config = given.args
        self.methods = build_stack(
            config.methods, config.method_params, config.seed, config.max_unrewarded_batches, refuse=False
        )
        check_names(HostTrainer, ASYNC_TRAINER)
        self._method_options = capabilities.check(self.methods, given)
        for name, value in self._method_options.items():
            setattr(config, name, value)
        self._methods_callback = AsyncCallback(self, fingerprint(given.dataset), capabilities.run_of(given))
        return changed(config, has_trainer=True)

    def check_server_logprobs(self) -> None:
        """The server must report log-probs of what it sampled from: TRL's ratio is made of them."""
        stack, ours = self.methods, not isinstance(self.rollout_worker, AsyncRolloutWorker)
        asked = stack.claims["policy_loss"] or stack.needs & {*SAMPLED}
        if ours or not asked or self.args.temperature == 1.0:
            return
        mode = self.vllm_client.get_server_info()["model_config"]["logprobs_mode"]
        if mode != "processed_logprobs":
            raise ConfigError(
                f"The methods need log-probs of what was sampled, but the vLLM server runs with --logprobs-mode "
                f"{mode}, which leaves out the temperature ({self.args.temperature}). Restart it with --logprobs-mode "
                f"processed_logprobs."
            )

    def prompt_index_of(self, sample: Any) -> int:
        """The row of the dataset a sample is of; -1 if nobody says."""
        if isinstance(sample, RowSample):
            return -1 if sample.row.plan is None else sample.row.plan.prompt_index
        if not isinstance(self.rollout_worker, AsyncRolloutWorker) or not has_numbers(self.train_dataset):
            return -1
        first = self.rollout_worker._loop_kwargs["dataset_start_index"]
        return int((first + sample.group_id) % len(self.train_dataset))

    # ---- from the queue to the batch

    def get_train_dataloader(self) -> Any:
        host = super().get_train_dataloader
        if not self.methods:
            return host()
        queue = LastSeen(self.rollout_queue)
        batcher = async_grpo_trainer.FixedCountBatcher

        def deciding(dataset: Any, *args: Any) -> Any:
            self._driver = Deciding(self, dataset, queue)
            return batcher(self._driver, *args)

        with (
            changed(self, rollout_queue=queue),
            changed(async_grpo_trainer, FixedCountBatcher=deciding, DataCollatorForRollout=ColumnsCollator),
        ):
            return host()

    # ---- one optimizer step

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        batches, items = super().get_batch_samples(*args, **kwargs)
        if self.methods and batches:
            callback = self._methods_callback
            host, model = super().compute_loss, self.model_wrapped
            model.train()
            scale, callback.idle = loss.step_begins(self, lambda inputs: host(model, inputs), batches)
            callback.lr_scale *= scale
            if self._driver is not None:
                logs.add(self, self._driver.logged.pop(self.state.global_step, {}))
        return batches, items

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        host = super().compute_loss
        if not self.methods or not self.model.training:
            return host(model, inputs, *args, **kwargs)
        return loss.compute_loss(self, lambda given: host(model, given, *args, **kwargs), inputs)


class AsyncCallback(RunCallback):
    """State before each decision: the dispatcher reads ahead, so a checkpoint holds the state of the batches that were
    trained, not of the one that waits.

    Args:
        trainer, fingerprint: see `RunCallback`.
        run: what methods are told of it.
    """

    def __init__(self, trainer: Any, fingerprint: str, run: Run) -> None:
        super().__init__(trainer, fingerprint)
        self._run = run
        self._before: dict[int, dict[str, Any]] = {}  # batch -> the state it was decided with

    def run(self) -> Run:
        return self._run

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        t = self.trainer
        self.watch(optimizer)
        on_driver(t.accelerator, t.check_server_logprobs)
        self.start()
        if self.resume_from is not None:
            checkpoint = self.resume_from
            t.methods.batch = on_driver(t.accelerator, lambda: self._read_state(checkpoint))

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.log_update()
        self.stop_if_asked(control)
        return control

    def batch_begins(self) -> None:
        stack = self.trainer.methods
        self._before = {b: s for b, s in self._before.items() if b >= stack.batch - 1}
        self._before[stack.batch] = stack.state_dict(self.fingerprint)

    def content(self) -> tuple[dict[str, Any], dict[str, Any]]:
        now: dict[str, Any] = self.trainer.methods.state_dict(self.fingerprint)
        return self._before.get(self.trainer.state.global_step, now), {}

    def _read_state(self, checkpoint: str) -> int:
        """Takes over the state of a checkpoint.

        Raises:
            StateError: see `runtime.resume.resume`.
        """
        t = self.trainer
        step, stack = t.state.global_step, t.methods
        marked = is_marked(t.state)
        resume(stack, checkpoint, fingerprint=self.fingerprint, step=step, batch=step, with_methods=marked)
        if isinstance(t.rollout_worker, GenerateWorker):
            t.rollout_worker.begin_at(step)
        return int(stack.batch)


class AsyncGRPOTrainer(AsyncMethodsMixin, HostTrainer):
    """`trl.experimental.async_grpo.AsyncGRPOTrainer` that takes `methods` in its config."""
