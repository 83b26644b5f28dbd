"""TRL's real asynchronous trainer on the CPU, with the worker of `rl_plugins.trl.asynchronous` in this process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from harness import WORLD, policy, score
from transformers.trainer_callback import PrinterCallback
from trl.experimental import async_grpo

from rl_plugins.demo.tasks import build_dataset
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
    args = async_config(output, methods, async_grpo.AsyncGRPOConfig if stock else AsyncGRPOConfig, **changes)
    worker = GenerateWorker(model, reward, data, args, lag)
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
