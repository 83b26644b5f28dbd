"""Trains a masked diffusion model in one process or under torchrun: `masked_ranks_script.py OUT`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import probes
import torch
from harness import WORLD, history, weights
from masked_runs import make_masked, noise_of_prompts

probes.register()
out = Path(sys.argv[1])
with noise_of_prompts():
    trainer = make_masked(
        out.parent,
        ["mdlm", "filter"],
        output_dir=out.parent / f"ranks{WORLD}",
        beta=0.04,
        gradient_accumulation_steps=2,
        num_iterations=2,
        max_steps=4,
        learning_rate=0.05,
    )
    trainer.train()
if trainer.accelerator.is_main_process:
    torch.save({"weights": weights(trainer), "loss": history(trainer, "loss")}, out)
