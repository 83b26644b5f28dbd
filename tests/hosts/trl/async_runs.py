"""TRL's real asynchronous trainer on the CPU, with the worker of `rl_plugins.trl.asynchronous` in this process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from harness import WORLD, policy, score
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl.experimental import async_grpo
from trl.experimental.async_grpo.async_rollout_worker import AsyncRolloutWorker, RolloutSample

from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.trl.asynchronous import AsyncGRPOConfig, AsyncGRPOTrainer, GenerateWorker, cpu

cpu.activate()


def async_config(output: Path, methods: Any = (), cls: type = AsyncGRPOConfig, **changes: Any) -> Any:
    values: dict[str, Any] = dict(
        output_dir=str(output),
        per_device_train_batch_size=32 // WORLD,
        gradient_accumulation_steps=1,
        num_generations=8,
        max_steps=4,
        learning_rate=1e-2,
        max_completion_length=10,
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        token_budget=0,
        max_staleness=8,
        optim="sgd",
        logging_steps=1,
        dataloader_pin_memory=False,
    )
    if WORLD > 1:
        values["ddp_backend"] = "gloo"
    values.update(changes)
    if cls is AsyncGRPOConfig:
        values["methods"] = list(methods)
    return cls(**values)


def make_async(
    folder: Path, methods: Any = (), *, stock: bool = False, lag: int = 2, reward: Any = score, **changes: Any
) -> Any:
    """A trainer on the tiny policy; `stock=True`: TRL's own classes with the same worker."""
    model = str(policy(folder / "policy"))
    data = build_dataset(64, seed=1)
    output = Path(changes.pop("output_dir", folder / "out"))
    trainer: Any = changes.pop("trainer", None)
    worker_class = changes.pop("worker_class", GenerateWorker)
    args = async_config(output, methods, async_grpo.AsyncGRPOConfig if stock else AsyncGRPOConfig, **changes)
    worker = worker_class(model, reward, data, args, lag)
    cls = trainer or (async_grpo.AsyncGRPOTrainer if stock else AsyncGRPOTrainer)
    torch.manual_seed(0)
    made = cls(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=data,
        rollout_worker=worker,
        weight_transfer=worker,
    )
    made.remove_callback(PrinterCallback)
    torch.manual_seed(0)
    return made


class AsTrls(GenerateWorker, AsyncRolloutWorker):
    """Generates as ours, and is TRL's own in everything that the trainer asks: it walks the dataset from
    `dataset_start_index`, counts groups from 0 in each process, and its samples say nothing more than TRL's. So TRL
    writes and reads its `rollout_state.json`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        GenerateWorker.__init__(self, *args, **kwargs)
        self._loop_kwargs = {"dataset_start_index": 0}

    def start(self) -> None:
        self.walked, self.group = self._loop_kwargs["dataset_start_index"], 0

    def begin_at(self, step: int) -> None: ...

    def update_model_version(self, model_version: int) -> None:
        if self._coming:  # at a resume TRL tells the number before there are weights
            super().update_model_version(model_version)

    def get(self, *args: Any, **kwargs: Any) -> RolloutSample:
        sample = super().get(*args, **kwargs)
        return RolloutSample(**{f: getattr(sample, f) for f in RolloutSample.__slots__})


class Kill(TrainerCallback):
    """SIGKILL right after an optimizer step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def as_trls(folder: Path) -> Any:
    """Seven steps, saved every second one, with a method that has state."""
    saves = dict(save_strategy="steps", save_steps=2, optim="adamw_torch", learning_rate=1e-3, max_steps=7)
    return make_async(folder, ["walked"], lag=1, worker_class=AsTrls, **saves)


def train_and_kill(folder: Path, step: int) -> None:
    import probes

    probes.register()
    trainer = as_trls(folder)
    trainer.add_callback(Kill(step))
    trainer.train()
