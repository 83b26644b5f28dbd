"""What the patches must leave as it is: the default configuration and the results of the built-in estimators.

Runs as `tests/test_unchanged_on_cpu.py` of a copy of verl (see `test_verl_patches.py`) and writes to `$RESULTS` what
the test compares between the stock and the patched verl. `_compute_advantage` runs on a trainer made without its
set-up, with a dictionary in place of TransferQueue.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
import verl
from hydra import compose, initialize_config_module
from omegaconf import OmegaConf
from tensordict import TensorDict
from transfer_queue import KVBatchMeta
from verl.trainer.ppo.v1 import trainer_base
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync
from verl.utils import tensordict_utils as tu

MASKS = [[1, 1, 1], [1, 0, 1, 1, 0], [1], [1, 1, 1, 1], [1, 1, 0, 0], [1, 1]]  # holes: tokens of a tool
FOLDER = Path(verl.__file__).parent / "trainer" / "config"


def composed(*overrides: str) -> Any:
    with initialize_config_module("verl.trainer.config", version_base=None):
        return compose("ppo_trainer", overrides=list(overrides))


class Queue:
    """TransferQueue of one partition: a read returns those of the selected columns that exist."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        self.data = tu.list_of_dict_to_tensordict(rows)
        self.selected: list[str] = []
        self.written: dict[str, torch.Tensor] = {}

    def kv_batch_get(self, keys: list[str], partition_id: str, select_fields: list[str]) -> TensorDict:
        self.selected = list(select_fields)
        return self.data.select(*select_fields, strict=False)

    def kv_batch_put(self, keys: list[str], partition_id: str, fields: TensorDict) -> KVBatchMeta:
        self.written = {name: value.to_padded_tensor(0.0) for name, value in fields.items()}
        return KVBatchMeta(partition_id=partition_id, keys=keys, tags=[{}] * len(keys))


def advantages(estimator: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the fetched fields and a hash of the bits of advantages and returns."""
    rows = []
    for i, mask in enumerate(MASKS):
        scores = torch.zeros(len(mask))
        scores[-1] = 0.3 * i % 1
        log_probs = -0.1 * torch.arange(1.0, len(mask) + 1.0)
        row = {"uid": f"prompt{i // 3}", "response_mask": torch.tensor(mask), "rm_scores": scores}
        row |= {"old_log_probs": log_probs, "rollout_log_probs": log_probs.clone()}
        row |= {"values": torch.linspace(0.0, 0.5, len(mask)), "extra_fields": {"task": f"task{i}"}}
        rows.append(row)
    trainer, queue = object.__new__(PPOTrainerSync), Queue(rows)
    trainer.config = composed(f"algorithm.adv_estimator={estimator}")
    monkeypatch.setattr(trainer_base, "tq", queue)
    keys = [f"{row['uid']}_{i}_0" for i, row in enumerate(rows)]
    trainer._compute_advantage(KVBatchMeta(partition_id="train", keys=keys, tags=[{}] * len(keys)), {})
    bits = b"".join(queue.written[name].numpy().tobytes() for name in ("advantages", "returns"))
    return {"fields": queue.selected, "digest": hashlib.sha256(bits).hexdigest()}


def test_unchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    estimators = ("gae", "grpo", "rloo", "reinforce_plus_plus")
    results: dict[str, Any] = {
        "host": str(Path(verl.__file__).resolve()),
        "default": OmegaConf.to_container(composed(), resolve=False),
        "advantages": {estimator: advantages(estimator, monkeypatch) for estimator in estimators},
        "generated_is_current": {},
    }
    for engine in ("", "megatron", "veomni", "torchtitan"):
        name = f"_generated_ppo_{engine + '_' if engine else ''}trainer.yaml"
        overrides = [f"model_engine={engine}"] if engine else []
        expected = OmegaConf.to_container(composed(*overrides), resolve=False)
        expected.pop("model_engine")  # the generated files start below it
        generated = OmegaConf.to_container(OmegaConf.load(FOLDER / name), resolve=False)
        results["generated_is_current"][name] = json.dumps(generated) == json.dumps(expected)  # the order, too
    Path(os.environ["RESULTS"]).write_text(json.dumps(results, default=str))
