"""Start, state inside the checkpoint, saving at generation boundaries, and what belongs to one optimizer step.

Between two generation batches TRL can resume exactly; inside one it regenerates the batch. So a save inside a batch
waits for its end. The last save of a run cannot wait: it is written with the state of the last boundary and marked, and
a resume from it repeats that batch.
"""

from __future__ import annotations

import dataclasses
import math
import os
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rl_plugins.core.errors import ConfigError, StateError
from rl_plugins.core.rollouts import Run
from rl_plugins.runtime.costs import NOTE, Costs
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.ranks import gather, on_driver
from rl_plugins.runtime.resume import resume, save_run
from rl_plugins.runtime.update import SKIPPED, SkippedSteps, check_gradient
from rl_plugins.trl import logs
from rl_plugins.trl.capabilities import known_of, run_of, too_few_prompts
from rl_plugins.trl.generation.engine import chat_of
from rl_plugins.trl.generation.rewards import with_reward_functions
from rl_plugins.trl.host import Trainer, has_numbers, tokenizer_of
from rl_plugins.trl.saved import (
    ALONE,
    OF_TRAINER,
    begin,
    files_of,
    is_marked,
    mark,
    noted_costs,
    sizes_of,
    skip_passes,
    state_checksum,
    tell_sizes,
)


class RunCallback(TrainerCallback):
    """What a run with methods needs in every trainer: state in its checkpoints, and what belongs to an optimizer step.

    Args:
        trainer: whose methods they are.
        fingerprint: of the dataset.

    Attributes:
        resume_from: the checkpoint whose state the methods take over when training starts.
        lr_scale: factor on the learning rate of the coming optimizer step.
        idle: nothing is trained in it, so the optimizer gets no gradient; of zeros AdamW would still move the weights.
    """

    def __init__(self, trainer: Any, fingerprint: str) -> None:
        self.trainer, self.fingerprint = trainer, fingerprint
        self.resume_from: str | None = None
        self.lr_scale, self.idle = 1.0, False
        self._started = self._stopping = False
        self._lr: list[Any] = []
        self._hooks: list[Any] = []  # on the optimizer
        self._skipped = SkippedSteps()

    def run(self) -> Run:
        """What methods are told of the run when it starts."""
        raise NotImplementedError

    def start(self) -> None:
        """`start` on the driver, once, however often training begins."""
        if self._started:
            return
        t = self.trainer
        rows = t.accelerator.unwrap_model(t.model).config.get_text_config().vocab_size  # some have no text
        t.methods.vocabulary = max(len(tokenizer_of(t)), rows)
        run = self.run()
        t.methods.check(run)  # again: now the reward functions of environments are known, too
        chat = chat_of(t)
        run = with_reward_functions(dataclasses.replace(run, fingerprint=self.fingerprint, chat=chat), t, chat)
        on_driver(t.accelerator, lambda: t.methods.start(run))
        self._started = True

    def log_update(self) -> None:
        """What was logged in the update place, over micro-batches and ranks, as one value per optimizer step."""
        t = self.trainer
        if not t.methods.claimed("before_update", "policy_loss", "regularize"):
            return
        values = combine(gather(t.accelerator, t.methods.metrics.take()))
        logs.add(t, values)
        t.methods.stats = values

    # A factor on the learning rate of one optimizer step; the schedule itself stays untouched. It is put in where the
    # optimizer itself steps, because DeepSpeed steps it at the end of the backward pass, and its schedule with it.

    def watch(self, optimizer: Any) -> None:
        """The optimizer below accelerate's and DeepSpeed's wrappers; once, however often training begins."""
        while hasattr(optimizer, "optimizer"):
            optimizer = optimizer.optimizer
        for hook in self._hooks:
            hook.remove()
        self._hooks = [
            optimizer.register_step_pre_hook(self._scale),
            optimizer.register_step_post_hook(self._unscale),
        ]

    def _scale(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if self.idle:
            optimizer.zero_grad(set_to_none=True)
        self._lr = [g["lr"] for g in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.lr_scale

    def _unscale(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        for group, lr in zip(optimizer.param_groups, self._lr, strict=True):
            group["lr"] = lr

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.lr_scale, self.idle = 1.0, False
        if self.trainer.accelerator.scaler is not None:
            skipped = float(self.trainer.accelerator.optimizer_step_was_skipped)
            logs.add(self.trainer, {SKIPPED: skipped})
            self._skipped.count(self.trainer.methods, skipped)

    def check_gradient(self) -> None:
        """Before the Trainer clips it: ends training on every rank before the weights move (with DeepSpeed, whose step
        is a part of the backward pass, right behind it). With a loss scale (fp16) infinite gradients are ordinary, and
        the scaler skips the step."""
        t = self.trainer
        if t.accelerator.sync_gradients and t.accelerator.scaler is None:
            # of all ranks, however parameters are split
            norm = t.accelerator.clip_grad_norm_(t.model_wrapped.parameters(), math.inf)
            if norm is not None:
                check_gradient(t.methods, float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm))

    def stop_if_asked(self, control: Any) -> None:
        """At the end of a generation batch: ends the run with a checkpoint if a method wants it, on every rank."""
        stack = self.trainer.methods
        if stack:
            stack.stop_reason = on_driver(self.trainer.accelerator, lambda: stack.stop_reason)
            if stack.stop_reason:
                self._stopping = control.should_save = control.should_training_stop = True

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self._stopping:
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            raise self.trainer.methods.stopped(str(folder))

    # ---- state

    def is_checkpoint(self, folder: str | None) -> bool:
        """Whether TRL makes a checkpoint of this folder; it saves the model alone elsewhere."""
        return (
            folder is not None
            and os.path.basename(folder) == f"{PREFIX_CHECKPOINT_DIR}-{self.trainer.state.global_step}"
        )

    def save_begins(self, checkpoint: str) -> None:
        if self._writes:
            begin(Path(checkpoint))
        mark(self.trainer.state, self.sizes())

    def write_state(self, checkpoint: str) -> None:
        """Writes the methods' state into a checkpoint, with the checksums of TRL's files: after them, and before the
        file that TRL writes last. On every rank."""
        t, start = self.trainer, time.perf_counter()
        files = files_of(t, checkpoint)
        logs.add(t, {"rl_plugins/checksum_seconds": time.perf_counter() - start})
        if self._writes:
            content, notes = self.content()
            notes |= {OF_TRAINER: state_checksum(dataclasses.asdict(t.state)), ALONE: bool(t.args.save_only_model)}
            save_run(checkpoint, content, t.state.global_step, files, **notes)

    def content(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The state to save now, and notes with it."""
        raise NotImplementedError

    def sizes(self) -> dict[str, float]:
        """Of the run, which a resume compares."""
        return {}

    @property
    def _writes(self) -> bool:
        """Only the driver has the state."""
        return bool(self.trainer.args.should_save and self.trainer.accelerator.is_main_process)


class MethodsCallback(RunCallback):
    """Comes after TRL's own flow callback, so it sees whether TRL wants to save.

    Args:
        trainer, fingerprint: see `RunCallback`.
    """

    def __init__(self, trainer: Trainer, fingerprint: str) -> None:
        super().__init__(trainer, fingerprint)
        self._save_waits = False
        self._boundary_state: dict[str, Any] = {}

    def run(self) -> Run:
        return run_of(known_of(self.trainer))

    def on_train_begin(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, train_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """`start` on the driver once, then the state of the checkpoint and its place in the dataset."""
        self.watch(optimizer)
        if not self._started:
            known = known_of(self.trainer)
            if known.size is not None and (problem := too_few_prompts(self.trainer.args, known.size)):
                raise ConfigError(problem)
        self.start()
        if self.resume_from is not None:
            self._read_state(self.resume_from)
            self._find_place(train_dataloader)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self.log_update()
        if self.trainer.updates_seen is not None:
            self.trainer.updates_seen.step_done()
        if self.at_boundary:
            control.should_save = control.should_save or self._save_waits
            self._save_waits = False
            self.stop_if_asked(control)
        elif control.should_save and not control.should_training_stop:
            control.should_save, self._save_waits = False, True
        elif control.should_training_stop and self._save_waits:
            control.should_save, self._save_waits = True, False
        return control

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        for watcher in self.trainer.methods.watchers:
            watcher.ended()

    # ---- state

    @property
    def at_boundary(self) -> bool:
        """Whether every update of the last generation batch is done."""
        t = self.trainer
        return t._step % (t.args.steps_per_generation * t.num_iterations) == 0

    def batch_begins(self) -> None:
        """Remembers the state, if a last save may need it."""
        t = self.trainer
        if t.args.steps_per_generation * t.num_iterations > t.args.gradient_accumulation_steps:
            self._boundary_state = self._state()

    def content(self) -> tuple[dict[str, Any], dict[str, Any]]:
        inside = not self.at_boundary
        return (self._boundary_state if inside else self._state()), {"inside_generation_batch": inside}

    def sizes(self) -> dict[str, float]:
        return sizes_of(self.trainer)

    def _state(self) -> dict[str, Any]:
        return {**self.trainer.methods.state_dict(self.fingerprint), NOTE: self.trainer.costs.plain()}

    def _read_state(self, checkpoint: str) -> None:
        """Takes over the state of a checkpoint, the same on every rank.

        Raises:
            StateError: see `runtime.resume.resume`.
        """
        t, stack = self.trainer, self.trainer.methods

        def read() -> tuple[int, int]:
            step = t.state.global_step
            generate_every = t.args.steps_per_generation * t.num_iterations
            batch = step * t.args.gradient_accumulation_steps // generate_every
            marked = is_marked(t.state)
            saved = resume(stack, checkpoint, fingerprint=self.fingerprint, step=step, batch=batch, with_methods=marked)
            t.costs = Costs.of_checkpoint(saved or noted_costs(t.state))
            tell_sizes(checkpoint, t.state, self.sizes())
            return stack.batch, stack.extra_prompts

        stack.batch, stack.extra_prompts = on_driver(t.accelerator, read)

    def _find_place(self, loader: Any) -> None:
        """The order of the prompts goes on where the checkpoint was.

        Raises:
            StateError: a stream that was passed more than once.
        """
        t = self.trainer
        passes = int(t.state.epoch or 0)
        if has_numbers(t.train_dataset):
            skip_passes(loader, passes, finished=t.state.global_step >= t.state.max_steps)
        elif passes:
            raise StateError(
                f"The checkpoint {self.resume_from} is in pass {passes + 1} over a stream (epoch {t.state.epoch:.2f}), "
                f"and TRL would begin that pass again. Resume from a checkpoint of the first pass, start a new run "
                f"from the checkpoint's weights, or give the dataset as one with random access."
            )
