"""Runs of a few steps on a device, with a method of each kind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from flow_runs import make as make_flow
from flow_runs import weights as flow_weights
from gpu_runs import KINDS, decisions, trainer_on
from harness import history, length, score, stub_sampling, weights
from masked_runs import make_masked
from peft import LoraConfig

pytestmark = pytest.mark.gpu

SAVING = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
LORA = {"peft_config": LoraConfig(r=4, target_modules="all-linear", task_type="CAUSAL_LM")}


@pytest.mark.parametrize("tuned", ["full", "lora"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_method_of_each_kind_trains_in_bf16(kind: str, tuned: str, device: str, tmp_path: Path, note: Any) -> None:
    methods, options, metric = KINDS[kind]
    more = {"more": LORA} if tuned == "lora" else {}
    trainer = trainer_on(device, tmp_path, methods, bf16=True, learning_rate=0.05, **SAVING, **more, **options)
    before = weights(trainer).clone()
    trainer.train()
    assert next(trainer.model.parameters()).device.type == device
    after = weights(trainer)
    assert bool(torch.isfinite(after).all()) and not torch.equal(before, after)
    losses = history(trainer, "loss")
    assert losses and all(x == x for x in losses)
    logged = {k for h in trainer.state.log_history for k in h if k.startswith(metric)}
    assert logged, f"{methods} log what they do"
    note("runs in bf16 with gradient checkpointing", f"{kind} ({', '.join(methods)}), {tuned}", steps=len(losses))


ROWS: dict[str, dict[str, Any]] = {
    "gdpo": {"reward": [score, length]},
    "brorl": {},
    "mc_grpo": {},
    "d3s": {},
    "dars": {"method_params": {"dars": {"n_first": 4, "n_max": 12}}},
}


@pytest.mark.parametrize("name", ROWS)
def test_decisions_on_the_same_rollouts_are_those_of_the_cpu(name: str, device: str, tmp_path: Path) -> None:
    found = []
    for place, bf16 in (("cpu", False), (device, True)):
        with stub_sampling(), decisions() as seen:
            trainer_on(place, tmp_path / place / str(bf16), [name], bf16=bf16, **ROWS[name]).train()
        found.append(seen)
    assert len(found[0]) == len(found[1]) == 2
    for here, there in zip(*found, strict=True):
        assert torch.equal(here.trained, there.trained)
        assert torch.equal(here.row_advantages, there.row_advantages)
        assert float(here.row_advantages.abs().max()) > 0.1


def test_the_masked_trainer(device: str, tmp_path: Path) -> None:
    trainer_on(device, tmp_path)  # the device of what follows
    trainer = make_masked(tmp_path, ["mdlm"], use_cpu=device == "cpu", bf16=True, learning_rate=0.05, max_steps=3)
    before = weights(trainer).clone()
    trainer.train()
    assert next(trainer.model.parameters()).device.type == device
    assert bool(torch.isfinite(weights(trainer)).all()) and not torch.equal(before, weights(trainer))


@pytest.mark.parametrize("methods", [[], ["branch_grpo"]], ids=["plain", "branch_grpo"])
def test_the_diffusion_trainer(methods: list[str], device: str, tmp_path: Path) -> None:
    trainer_on(device, tmp_path)
    trainer = make_flow(tmp_path / "flow", methods, use_cpu=device == "cpu")
    before = flow_weights(trainer).clone()
    trainer.train()
    after = flow_weights(trainer)
    assert after.device.type == device and bool(torch.isfinite(after).all()) and not torch.equal(before, after)
