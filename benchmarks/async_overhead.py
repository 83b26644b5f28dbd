"""CPU seconds per optimizer step of the asynchronous TRL trainer: stock TRL, `methods: []`, and methods, in one run.

The same worker makes the rollouts of every arm, and its time is left out. What is counted is the trainer with queue,
driver, packing, loss and optimizer. Arms take turns. Reported: minimum and median over repetitions, and the median of
the ratio to stock in the same repetition.

    python benchmarks/async_overhead.py --repeat 7 --steps 5 --rows 256
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import torch
from transformers import TrainerCallback
from transformers.trainer_callback import PrinterCallback
from trl.experimental import async_grpo

from rl_plugins.lab.demo import rewards
from rl_plugins.lab.demo.policy import load_policy
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.trl.asynchronous import AsyncGRPOConfig, AsyncGRPOTrainer, GenerateWorker, cpu

ARMS: dict[str, list[str] | None] = {
    "stock": None,
    "methods: []": [],
    "gdpo": ["gdpo"],
    "minpro": ["minpro"],
    "decoupled_ppo": ["decoupled_ppo"],
    "vcpo": ["vcpo"],
}


class Clock(TrainerCallback):
    """CPU seconds of each optimizer step, without those of the worker."""

    def __init__(self, worker: GenerateWorker) -> None:
        self.steps: list[float] = []
        self.worker, own = 0.0, worker.get

        def get(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            sample = own(*args, **kwargs)
            self.worker += time.process_time() - start
            return sample

        worker.get = get  # type: ignore[method-assign]
        self.begun = 0.0

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        self.begun = time.process_time() - self.worker

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        now = time.process_time() - self.worker
        self.steps.append(now - self.begun)
        self.begun = now


def measure(methods: list[str] | None, folder: Path, rows: int, steps: int) -> float:
    """CPU seconds per optimizer step, without the first."""
    config, cls = (
        (AsyncGRPOConfig, AsyncGRPOTrainer)
        if methods is not None
        else (
            async_grpo.AsyncGRPOConfig,
            async_grpo.AsyncGRPOTrainer,
        )
    )
    args = config(
        output_dir=str(folder),
        per_device_train_batch_size=rows,
        max_steps=steps + 1,
        num_generations=8,
        max_completion_length=14,
        learning_rate=1e-5,
        token_budget=0,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        logging_steps=1000,
        **({"methods": methods} if methods is not None else {}),
    )
    model, data, functions = str(load_policy()), build_dataset(2000), [rewards.digits, rewards.careful]
    worker = GenerateWorker(model, functions, data, args, lag=2)
    trainer = cls(
        model=model,
        reward_funcs=functions,
        args=args,
        train_dataset=data,
        rollout_worker=worker,
        weight_transfer=worker,
    )
    clock = Clock(worker)
    trainer.add_callback(clock)
    trainer.remove_callback(PrinterCallback)
    torch.manual_seed(0)
    trainer.train()
    return sum(clock.steps[1:]) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--steps", type=int, default=5, help="timed optimizer steps per repetition")
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/async_overhead.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    cpu.activate()
    gc.freeze()
    results: dict[str, list[float]] = {name: [] for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(args.repeat):
            for name, methods in ARMS.items():
                results[name].append(measure(methods, Path(folder), args.rows, args.steps))
    table = {}
    for name, values in results.items():
        ratio = statistics.median(v / b for v, b in zip(values, results["stock"], strict=True))
        table[name] = {"step_min": min(values), "step_median": statistics.median(values), "ratio": ratio}
        print(f"{name:16} {min(values) * 1e3:7.0f}ms {statistics.median(values) * 1e3:7.0f}ms {ratio:7.2f}")
    args.out.write_text(
        json.dumps({"rows": args.rows, "steps": args.steps, "repeat": args.repeat, "arms": table}, indent=1)
    )


if __name__ == "__main__":
    main()
