"""Saving at generation boundaries, state inside the checkpoint, and what belongs to one optimizer step.

Between two generation batches TRL can resume exactly; inside one it regenerates the batch. So a save inside a batch
waits for its end. The last save of a run cannot wait: it is written with the state of the last boundary and marked, and
a resume from it repeats that batch.
"""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from rl_plugins.errors import StateError
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.trl.ranks import gather, on_driver


class MethodsCallback(TrainerCallback):  # type: ignore[misc]
    """Comes after TRL's own flow callback, so it sees whether TRL wants to save."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer
        self.save_waits = False
        self.lr_scale = 1.0
        self._lr: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.trainer._start_methods()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._log_update(args, state)
        if at_boundary(self.trainer):
            control.should_save = control.should_save or self.save_waits
            self.save_waits = False
        elif control.should_save and not control.should_training_stop:
            control.should_save, self.save_waits = False, True
        elif control.should_training_stop and self.save_waits:
            control.should_save, self.save_waits = True, False
        return control

    def _log_update(self, args: Any, state: Any) -> None:
        """What was logged in the update place, over micro-batches and ranks, as one value per optimizer step."""
        t = self.trainer
        if not t.methods.claimed("before_update", "policy_loss", "regularize"):
            return
        values = combine(gather(t.accelerator, t.methods.metrics.take()))
        for name, value in values.items():
            t._metrics["train"][name].append(value)
        t.methods.stats = values

    # A factor on the learning rate of one optimizer step; the schedule itself stays untouched.

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        if self.lr_scale != 1.0:
            self._lr = [g["lr"] for g in optimizer.param_groups]
            for group in optimizer.param_groups:
                group["lr"] = group["lr"] * self.lr_scale

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any) -> None:
        for group, lr in zip(optimizer.param_groups, self._lr, strict=False):
            group["lr"] = lr
        self._lr, self.lr_scale = [], 1.0


def at_boundary(trainer: Any) -> bool:
    """Whether every update of the last generation batch is done."""
    return bool(trainer._step % (trainer.args.steps_per_generation * trainer.num_iterations) == 0)


def write_state(trainer: Any, trial: Any) -> None:
    """Writes the methods' state into the checkpoint folder before TRL fills it."""
    if not (trainer.args.should_save and trainer.accelerator.is_main_process):
        return  # only the driver has the state
    folder = os.path.join(trainer._get_output_dir(trial=trial), f"{PREFIX_CHECKPOINT_DIR}-{trainer.state.global_step}")
    os.makedirs(folder, exist_ok=True)
    inside = not at_boundary(trainer)
    content = trainer._boundary_state if inside else trainer.methods.state_dict(trainer._fingerprint)
    save_state(folder, {**content, "inside_generation_batch": inside})


def read_state(trainer: Any, checkpoint: str) -> None:
    """Takes over the state of a checkpoint, the same on every rank.

    Raises:
        StateError: missing where a method needs it, corrupt, or of another run.
    """
    stack = trainer.methods

    def read() -> tuple[int, int]:
        saved = load_state(checkpoint)
        if saved is None:
            stateful = [m.name for m in stack.methods if m._state]
            if stateful:
                raise StateError(
                    f"The checkpoint {checkpoint} holds no state of methods, and {', '.join(stateful)} cannot resume "
                    f"without theirs. To go on from its weights, start a new run with that folder as the model."
                )
            generate_every = trainer.args.steps_per_generation * trainer.num_iterations
            return trainer.state.global_step * trainer.args.gradient_accumulation_steps // generate_every, 0
        stack.load_state_dict(saved, trainer._fingerprint)
        return stack.batch, stack.extra_prompts

    stack.batch, stack.extra_prompts = on_driver(trainer.accelerator, read)
