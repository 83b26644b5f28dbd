"""Two steps of sampled training without a hook in use: every bit of the weights must stay that of the stock TRL.

Runs as `tests/test_weights.py` of a copy of TRL (see `test_trl_patches.py`) and writes digests to `$RESULTS`.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from trl.trainer import grpo_trainer

CASES: dict[str, tuple[type, dict[str, Any]]] = {
    "dapo": (GRPOTrainer, {}),
    "grpo_kl_reuse": (GRPOTrainer, {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2}),
    "dr_grpo": (GRPOTrainer, {"loss_type": "dr_grpo"}),
    "luspo": (GRPOTrainer, {"loss_type": "luspo"}),
    "sapo": (GRPOTrainer, {"loss_type": "sapo"}),
    "rloo_kl": (RLOOTrainer, {"beta": 0.1}),
}


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [float(sum(ids) % 7) for ids in completion_ids]


def test_weights(tmp_path: Path) -> None:
    results: dict[str, Any] = {"host": str(Path(grpo_trainer.__file__).resolve())}
    for name, (cls, config) in CASES.items():
        args = (RLOOConfig if cls is RLOOTrainer else GRPOConfig)(
            output_dir=str(tmp_path),
            per_device_train_batch_size=8,
            gradient_accumulation_steps=2,
            num_generations=4,
            max_completion_length=8,
            max_steps=2,
            optim="sgd",
            max_grad_norm=0.0,
            bf16=False,
            report_to="none",
            save_strategy="no",
            **{"learning_rate": 1.0, "beta": 0.0, **config},
        )
        prompts = Dataset.from_dict({"prompt": ["a:12", "b:345", "c:6", "d:78"] * 2})
        model = "trl-internal-testing/tiny-Qwen2ForCausalLM-2.5"
        trainer = cls(model=model, reward_funcs=reward, args=args, train_dataset=prompts)
        before = torch.cat([p.detach().flatten() for p in trainer.model.parameters()]).clone()
        trainer.train()
        after = torch.cat([p.detach().flatten() for p in trainer.model.parameters()])
        digest = hashlib.sha256(after.numpy().tobytes()).hexdigest()
        results[name] = {"moved": (after - before).norm().item(), "digest": digest}
    Path(os.environ["RESULTS"]).write_text(json.dumps(results))
