"""Several ranks, kills and resumes of the diffusion trainer: the results are those of one undisturbed process."""

from __future__ import annotations

import json
import shutil
import signal

import pytest
import torch
from flow_runs import SHAPE, ended, free_port, in_a_fork, kill_myself, make, weights
from messages import raises
from safetensors.torch import load_file, save_file

from rl_plugins.core.errors import MethodError, StateError
from rl_plugins.diffusion import checkpoint
from rl_plugins.diffusion.logs import read_metrics
from rl_plugins.runtime.cheap import CheapOptions

pytestmark = pytest.mark.host

TIMES = ("time/batch", "time/update", "time/cheap_refresh")
BATCHES = 6


def lines(folder):
    return [{k: v for k, v in line.items() if k not in TIMES} for line in read_metrics(folder)]


# ---- ranks

LORA = {"lora_targets": ["inner", "outer"]}
STAGES = {"sol_rl_explore": {"pool": 2, "steps": 3}}
TREES = {
    "branch_rollout": {"splits": [0, 1, 3], "s": 2.0},
    "branch_advantages": {"fusion": "paths"},
    "branch_pruning": {"depths": [6], "interval": 2, "stop_depth": 4, "width": "parent_top1"},
}
STACKS = {
    "grpo": ([], {"beta": 0.1, "updates_per_batch": 2}),
    "mc_grpo, forks": (["forks", "mc_grpo"], {"prompts_per_batch": 3}),  # one rank has a prompt more
    "longer, same": (["longer", "same"], {"rows_per_pass": 3}),
    "nft": ([], {"objective": "nft", "beta": 0.1, "steps": 5, "updates_per_batch": 2, "lora_rank": 2, **LORA}),
    "sol_rl, nft": (["sol_rl"], {"objective": "nft", "cheap": CheapOptions("fp4"), "method_params": STAGES}),
    "branch_grpo": (["branch_grpo"], {"prompts_per_batch": 3, "group_size": 8, "method_params": TREES}),
}


@pytest.mark.ranks
@pytest.mark.parametrize("name", STACKS)
def test_two_ranks_are_one(tmp_path, name):
    methods, options = STACKS[name]
    one = make(tmp_path / "one", methods, **options)
    one.train()

    def train():
        trainer = make(tmp_path / "two", methods, **options)
        history = trainer.train()
        rank = trainer.accelerator.process_index
        assert trainer.accelerator.num_processes == 2 and len(history) == 3 * (rank == 0)
        save_file({"weights": weights(trainer)}, str(tmp_path / f"{rank}.safetensors"))

    port = free_port()
    children = [in_a_fork(train, rank, 2, port) for rank in range(2)]
    assert [ended(child) for child in children] == [0, 0]
    found = [load_file(str(tmp_path / f"{rank}.safetensors"))["weights"] for rank in range(2)]
    assert torch.equal(*found) and torch.allclose(found[0], weights(one), atol=2e-4)
    for a, b in zip(lines(tmp_path / "one"), lines(tmp_path / "two"), strict=True):
        assert a.keys() == b.keys()
        assert a == pytest.approx(b, abs=1e-3), (a, b)


@pytest.mark.ranks
def test_an_error_on_one_rank_ends_all(tmp_path):
    def train():
        def breaks(samples, conditions):
            if trainer.accelerator.process_index == 1:
                raise ValueError("the judge is down")
            return [1.0] * len(samples)

        trainer = make(tmp_path, reward_funcs=breaks)
        with pytest.raises((MethodError, ValueError), match="the judge is down"):
            trainer.train()

    port = free_port()
    children = [in_a_fork(train, rank, 2, port) for rank in range(2)]
    assert [ended(child) for child in children] == [0, 0]


# ---- kills

OPTIONS = {"batches": BATCHES, "save_every": 2, "updates_per_batch": 2, "warmup_steps": 5}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    trainer = make(folder, ["looks", "gdpo"], reward_funcs=[first, second], **OPTIONS)
    trainer.train()
    return folder, weights(trainer), trainer.methods.methods[0].state


def first(samples, conditions):
    return samples.mean((1, 2, 3))


def second(samples, conditions):
    return -samples.flatten(1).std(1)


def killed_at(monkeypatch, moment):
    """Patches the trainer so that its process dies at a moment of the fourth batch."""
    if moment == "in the update":
        from rl_plugins.diffusion.update import Updater

        original = Updater._gradients

        def dies(self):
            if self.step == 7:
                kill_myself()
            return original(self)

        monkeypatch.setattr(Updater, "_gradients", dies)
        return
    name = {"before a save": "begin", "in a save": "write_weights", "before the rename": "finish"}[moment]
    original_save = getattr(checkpoint, name)

    def dies_saving(*args):
        if "checkpoint-4" in str(args[0]) or (name == "begin" and args[1] == 4):
            if name == "write_weights":
                (args[0] / checkpoint.WEIGHTS).write_bytes(b"half")
            kill_myself()
        return original_save(*args)

    monkeypatch.setattr(checkpoint, name, dies_saving)


@pytest.mark.parametrize("moment", ["in the update", "before a save", "in a save", "before the rename"])
def test_a_killed_run_goes_on_bit_for_bit(tmp_path, monkeypatch, undisturbed, moment):
    folder, wanted, state = undisturbed

    def train():
        killed_at(monkeypatch, moment)
        make(tmp_path, ["looks", "gdpo"], reward_funcs=[first, second], **OPTIONS).train()

    assert ended(in_a_fork(train)) == -signal.SIGKILL
    assert [p.name for p in checkpoint.checkpoints(tmp_path)] == ["checkpoint-2"]
    trainer = make(tmp_path, ["looks", "gdpo"], reward_funcs=[first, second], **OPTIONS)
    assert len(trainer.train(resume_from=True)) == BATCHES - 2
    assert torch.equal(weights(trainer), wanted)
    assert trainer.methods.methods[0].state == state
    assert lines(tmp_path) == lines(folder)
    assert [p.name for p in sorted(tmp_path.glob("checkpoint-*"))] == ["checkpoint-4", "checkpoint-6"]


def resumed(folder, methods=("looks", "gdpo"), **changes):
    return make(folder, methods, reward_funcs=[first, second], **{**OPTIONS, **changes}).train(resume_from=True)


def test_what_cannot_be_resumed_is_said(tmp_path, undisturbed):
    folder = tmp_path / "run"

    def again():
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(undisturbed[0], folder)

    again()
    with raises(StateError, match="checkpoint-6.*resume_from=True"):
        make(folder, **OPTIONS).train()
    with raises(StateError, match="checkpoint-4.*checkpoint-6"):
        make(folder, **OPTIONS).train(resume_from="nowhere")
    with raises(StateError, match="no checkpoint"):
        make(folder, **OPTIONS).train(resume_from=str(tmp_path))
    assert resumed(folder, ["gdpo"]) == []  # the state of `looks` is dropped
    again()
    with raises(StateError, match="12.*6"):
        resumed(folder, updates_per_batch=1)
    with raises(StateError, match="dataset"):
        resumed(folder, train_dataset=[{"prompt": 1, "level": i} for i in range(5)])
    (folder / "checkpoint-6" / checkpoint.WEIGHTS).write_bytes(b"damaged")
    with raises(StateError, match="policy.safetensors has 7 bytes in place of"):
        resumed(folder)
    with raises(StateError, match="weights"):
        resumed(folder, accept_changed_checkpoint=True)
    shutil.rmtree(folder / "checkpoint-6")
    state = folder / "checkpoint-4" / "rl_plugins" / "state.json"
    state.write_text(state.read_text().replace('"step"', '"stop"', 1))
    with raises(StateError, match="its checksum differs"):
        resumed(folder)
    again()
    assert resumed(folder) == []  # it is at its end
    assert len(resumed(folder, batches=BATCHES + 1)) == 1
    assert json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["batch"] == BATCHES + 1
    assert SHAPE == (1, 2, 2)
