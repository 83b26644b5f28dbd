"""verl's real SFT trainer with OTR on the CPU platform, one process of torchrun: `sft_script.py FOLDER CASES OUT`.

Every case is a list of overrides. What each optimizer step had and gave goes to OUT, one file for each rank.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_module

import rl_plugins.verl.plugin  # noqa: F401  the entry point; a stale egg-info beside the sources would hide it
from rl_plugins.verl import otr


def options(folder: Path) -> list[str]:
    return [
        f"data.train_files={folder}/train.parquet",
        f"model.path={folder}/policy",
        "model.use_remove_padding=False",
        "model.enable_gradient_checkpointing=False",
        "+model.override_config.attn_implementation=sdpa",
        "engine.strategy=fsdp2",
        "engine.use_torch_compile=False",
        "+engine.mixed_precision.param_dtype=fp32",
        "data.train_batch_size=16",
        "data.use_dynamic_bsz=False",
        "data.micro_batch_size_per_gpu=4",
        "data.num_workers=0",
        "data.max_length=64",
        "optim.optimizer=SGD",
        "optim.lr=0.1",
        "optim.clip_grad=1e9",
        "trainer.device=cpu",
        "trainer.logger=[]",
        "trainer.total_training_steps=1",
        "trainer.total_epochs=1",
        f"trainer.default_local_dir={folder}/ckpt",
        "trainer.resume_mode=disable",
    ]


def config(folder: Path, overrides: list[str]) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("sft_trainer_engine", [*options(folder), *overrides])


class Recorded(otr.OtrSFTTrainer):
    """Keeps the rows, the gradient and the metrics of every step."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.steps: list[dict[str, Any]] = []
        self.validated: list[float] = []
        own, step, infer = (
            self.training_client.train_batch,
            self.engine.optimizer_step,
            self.training_client.infer_batch,
        )

        def train_batch(data: Any) -> Any:
            self.steps.append({"ids": list(data["input_ids"].unbind()), "mask": list(data["loss_mask"].unbind())})
            output = own(data=data)
            self.steps[-1]["metrics"] = otr.tu.get(output, "metrics")
            return output

        def optimizer_step() -> Any:
            whole = [p.grad.full_tensor().flatten() for p in self.engine.module.parameters()]
            self.steps[-1]["gradient"] = torch.cat(whole).clone()
            return step()

        def infer_batch(data: Any) -> Any:
            output = infer(data)
            self.validated.append(otr.tu.get(output, "metrics")["loss"])
            return output

        self.training_client.train_batch, self.training_client.infer_batch = train_batch, infer_batch
        self.engine.optimizer_step = optimizer_step


def main(folder: str, cases: str, out: str) -> None:
    from verl.utils.distributed import destroy_global_process_group, initialize_global_process_group

    initialize_global_process_group()
    found = []
    for overrides in json.loads(cases):
        trainer = Recorded(config=config(Path(folder), overrides))
        trainer.ckpt_handler.save_checkpoint = lambda step: None
        trainer.fit()
        found.append((trainer.steps, trainer.validated))
    torch.save(found, f"{out}-{torch.distributed.get_rank()}")
    destroy_global_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
