"""Real SFTTrainers on the tiny policy, in this process and in ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import trl
from datasets import Dataset
from harness import WORLD, weights
from transformers.trainer_callback import PrinterCallback

from rl_plugins.lab.demo.policy import build_model, build_tokenizer
from rl_plugins.lab.demo.tasks import build_rows
from rl_plugins.trl.commands.sft import SFTConfig, SFTTrainer

ROWS = 32  # of an optimizer step, all ranks and micro-batches together
OTR = dict(loss_type="otr", otr_expected=True)


def policy(folder: Path, padding: int = 0) -> Path:
    """An untrained demo policy on disk, its head as wide as the tokenizer and some ids of padding."""
    if not (folder / "config.json").exists():
        tokenizer = build_tokenizer()
        model = build_model(0)
        model.resize_token_embeddings(len(tokenizer) + padding, mean_resizing=False)
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return folder


def dataset(rows: int = 64) -> Dataset:
    """Prompts and answers of several lengths."""
    return Dataset.from_list(
        [{"prompt": r["prompt"][-1]["content"], "completion": "=" + r["answer"]} for r in build_rows(rows, seed=2)]
    )


def make(
    folder: Path,
    *,
    stock: bool = False,
    data: Any = None,
    callbacks: Any = None,
    peft_config: Any = None,
    **changes: Any,
) -> Any:
    """A trainer; `stock`: TRL's own classes."""
    values: dict[str, Any] = dict(
        output_dir=str(folder / "out"),
        max_steps=2,
        learning_rate=0.5,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        use_cpu=True,
        bf16=False,
        report_to="none",
        gradient_checkpointing=False,
        save_strategy="no",
        disable_tqdm=True,
        seed=0,
        dataloader_pin_memory=False,
        logging_steps=1,
    )
    if WORLD > 1:
        values["ddp_backend"] = "gloo"
    values.update(changes)
    values.setdefault("per_device_train_batch_size", ROWS // WORLD // values.get("gradient_accumulation_steps", 1))
    torch.manual_seed(0)
    made = (trl.SFTTrainer if stock else SFTTrainer)(
        model=str(policy(folder / "policy")),
        args=(trl.SFTConfig if stock else SFTConfig)(**values),
        train_dataset=dataset() if data is None else data,
        callbacks=callbacks,
        peft_config=peft_config,
    )
    made.remove_callback(PrinterCallback)
    return made


def trained(folder: Path, **changes: Any) -> torch.Tensor:
    made = make(folder, **changes)
    made.train()
    return weights(made)


def main(folder: Path, cases: list[dict[str, Any]], out: Path) -> None:
    """As one of the ranks: trains every case; the main rank writes the weights of each, flat."""
    found = [trained(folder, **changes) for changes in cases]
    if torch.distributed.get_rank() == 0:
        torch.save(found, out)
    torch.distributed.barrier()
