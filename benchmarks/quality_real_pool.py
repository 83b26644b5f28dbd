"""Sketched score functions of the rollouts in `real_pool`, so that gradients can be measured in them.

    python benchmarks/quality_real_pool.py 12      # writes real_pool/scores-12.npy: 0.4 s of a core for each rollout

The gradient of each rollout's log-prob in the parameters of LoRA is stored as 192 numbers in float16: (prompts,
rollouts, 192), of the first 32 rollouts of each prompt. Step 0 has no adapter, so its gradient is that in the second
matrices of a new one. `rl-plugins bench --quality --task benchmarks/real_pool/rollouts-12.parquet` measures in them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import torch

from rl_plugins.lab.real.model import model_folder
from rl_plugins.tools.gradient_quality.sketch import score_sketches

POOL, ROLLOUTS, DIMS = Path(__file__).parent / "real_pool", 32, 192


def policy(step: str) -> Any:
    """The model with the adapter of a step, whose parameters require a gradient."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(model_folder("bfloat16"), dtype=torch.bfloat16)
    if step != "0":
        return PeftModel.from_pretrained(model, POOL / f"adapter-{step}", is_trainable=True).eval()
    (of_run, *_) = sorted(POOL.glob("adapter-*/adapter_config.json"))
    same = {k: v for k, v in json.loads(of_run.read_text()).items() if k in ("r", "lora_alpha", "target_modules")}
    torch.manual_seed(0)
    return get_peft_model(model, LoraConfig(**same, task_type="CAUSAL_LM")).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("step", help="of the run, as in the names of the rollouts' files")
    step = parser.parse_args().step
    torch.set_num_threads(1)
    prompts = pq.read_table(POOL / "prompts.parquet")["prompt_ids"].to_pylist()
    rows = pq.read_table(POOL / f"rollouts-{step}.parquet", columns=["completion_ids"])["completion_ids"].to_pylist()
    model, made, each = policy(step), [], len(rows) // len(prompts)
    for i, prompt in enumerate(prompts):
        part = rows[i * each : i * each + ROLLOUTS]
        made.append(score_sketches(model, [prompt] * ROLLOUTS, part, DIMS, batch=ROLLOUTS).numpy())
        print(f"prompt {i}", flush=True)
    np.save(POOL / f"scores-{step}.npy", np.stack(made).astype(np.float16))


if __name__ == "__main__":
    main()
