"""Short runs of TRL on the CPU that write nothing and print nothing: what the benchmarks of its trainer share."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def cpu_run(
    folder: Path,
    rows: int,
    steps: int,
    reward: Any,
    stock: bool = False,
    model: Any = None,
    dataset: Any = None,
    **more: Any,
) -> Any:
    """A trainer of the embedded policy, which is ready to train.

    Args:
        folder: of its output, which stays empty.
        rows: of one process per optimizer step, in groups of 8 unless `num_generations` is given.
        steps: optimizer steps.
        stock: TRL's own trainer instead of ours.
        model, dataset: instead of the embedded policy and its task.
        more: further options of the config.
    """
    import trl
    from transformers.trainer_callback import PrinterCallback

    from rl_plugins.lab.demo.policy import load_policy
    from rl_plugins.lab.demo.tasks import build_dataset
    from rl_plugins.trl import GRPOConfig, GRPOTrainer

    config, trainer = (trl.GRPOConfig, trl.GRPOTrainer) if stock else (GRPOConfig, GRPOTrainer)
    options: dict[str, Any] = dict(
        num_generations=8,
        max_completion_length=14,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
        logging_steps=1000,
    )
    args = config(output_dir=str(folder), per_device_train_batch_size=rows, max_steps=steps, **(options | more))
    made = trainer(
        model=str(load_policy() if model is None else model),
        reward_funcs=reward,
        args=args,
        train_dataset=build_dataset(2000) if dataset is None else dataset,
    )
    made.remove_callback(PrinterCallback)
    return made
