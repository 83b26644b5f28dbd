"""A checkpoint with methods whose files are not those of its save is refused by name, before it is loaded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from harness import history, make, weights
from messages import raises

from rl_plugins.core.errors import StateError
from rl_plugins.runtime.state import FOLDER, load_state

pytestmark = pytest.mark.host

OPTIONS = dict(save_strategy="steps", save_steps=2, learning_rate=0.05, optim="adamw_torch", max_completion_length=6)


def run(folder, methods, steps, resume=None, **options):
    t = make(folder, methods, **{"max_steps": steps, **OPTIONS, **options})
    t.train(resume_from_checkpoint=resume)
    return t


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Runs of two seeds with a checkpoint at steps 2 and 4."""
    folders = {}
    for seed in (0, 1):
        folders[seed] = tmp_path_factory.mktemp(f"seed{seed}")
        run(folders[seed], ["mc_grpo"], 4, seed=seed)
    return folders


@pytest.fixture
def folder(saved, tmp_path):
    shutil.copytree(saved[0], tmp_path / "run")
    return tmp_path / "run"


def turn_a_bit(file, place=0.5):
    data = bytearray(file.read_bytes())
    data[int(len(data) * place)] ^= 1
    file.write_bytes(bytes(data))


def told(caplog):
    """What the run said of its checkpoint."""
    return [r.message for r in caplog.records if r.name == "rl_plugins" and "The checkpoint" in r.message]


def lose(*names):
    return lambda checkpoint, other: [(checkpoint / name).unlink() for name in names]


def of_other(names, step=4):
    def damage(checkpoint, other):
        source = (other if step == 4 else checkpoint.parent) / f"checkpoint-{step}"
        for name in names:
            put = shutil.copytree if (source / name).is_dir() else shutil.copy
            shutil.rmtree(checkpoint / name) if (checkpoint / name).is_dir() else None
            put(source / name, checkpoint / name)

    return damage


def edit_log(checkpoint, other):
    """Valid JSON of the right step with another number."""
    file = checkpoint / "trainer_state.json"
    values = json.loads(file.read_text())
    values["log_history"][0]["loss"] = 123.0
    file.write_text(json.dumps(values))


DAMAGES = {
    "no optimizer": (lose("optimizer.pt"), "optimizer.pt is missing"),
    "no scheduler": (lose("scheduler.pt"), "scheduler.pt is missing"),
    "no random state": (lose("rng_state.pth"), "rng_state.pth is missing"),
    "none of the three": (
        lose("optimizer.pt", "scheduler.pt", "rng_state.pth"),
        "optimizer.pt is missing; rng_state.pth is missing; scheduler.pt is missing",
    ),
    "no config": (lose("config.json"), "config.json is missing"),
    "a bit of the weights": (
        lambda c, o: turn_a_bit(c / "model.safetensors", 0.9),
        "model.safetensors has another content",
    ),
    "a bit of the optimizer": (lambda c, o: turn_a_bit(c / "optimizer.pt"), "optimizer.pt has another content"),
    "a bit of the random state": (lambda c, o: turn_a_bit(c / "rng_state.pth"), "rng_state.pth has another content"),
    "a byte more": (
        lambda c, o: (c / "optimizer.pt").write_bytes((c / "optimizer.pt").read_bytes() + b"x"),
        r"optimizer.pt has \d+ bytes in place of \d+",
    ),
    "weights of an older step": (of_other(["model.safetensors"], 2), "model.safetensors has another content"),
    "scheduler of an older step": (of_other(["scheduler.pt"], 2), "scheduler.pt has"),
    "weights of another seed": (of_other(["model.safetensors"]), "model.safetensors has another content"),
    "log of another seed": (of_other(["trainer_state.json"]), "trainer_state.json has another content"),
    "another number in the log": (edit_log, "trainer_state.json has another content"),
    "our folder of another seed": (of_other([FOLDER]), "made with seed 1, and this run has seed 0"),
    "further weights": (
        lambda c, o: shutil.copy(c / "model.safetensors", c / "adapter_model.safetensors"),
        "adapter_model.safetensors was added",
    ),
}


@pytest.mark.parametrize(
    ("methods", "damage"),
    [*((["mc_grpo"], damage) for damage in DAMAGES), ([], "none of the three"), ([], "log of another seed")],
)
def test_a_changed_checkpoint_is_refused_by_name_before_it_is_loaded(saved, folder, methods, damage):
    change, said = DAMAGES[damage]
    change(folder / "out" / "checkpoint-4", saved[1] / "out")
    t = make(folder, methods, max_steps=6, **OPTIONS)
    before = weights(t).clone()
    with raises(StateError, match=f"checkpoint-4.*{said}.*accept_changed_checkpoint=True"):
        t.train(resume_from_checkpoint=True)
    assert torch.equal(weights(t), before) and t.state.global_step == 0
    assert not (folder / "out" / "checkpoint-6").exists()


def test_who_changed_it_on_purpose_goes_on_and_is_told(folder, caplog):
    turn_a_bit(folder / "out" / "checkpoint-4" / "model.safetensors", 0.9)
    with caplog.at_level("WARNING", "rl_plugins"):
        t = run(folder, ["mc_grpo"], 6, resume=True, accept_changed_checkpoint=True)
    assert t.state.global_step == 6
    (line,) = told(caplog)
    assert "model.safetensors has another content" in line


def test_another_seed_is_another_run(folder, caplog):
    with raises(StateError, match="made with seed 0, and this run has seed 5"):
        run(folder, ["mc_grpo"], 6, resume=True, seed=5)
    assert run(folder, ["mc_grpo"], 6, resume=True, seed=5, accept_changed_checkpoint=True).state.global_step == 6


def test_an_untouched_checkpoint_and_files_that_no_host_reads_say_nothing(folder, caplog):
    checkpoint = folder / "out" / "checkpoint-4"
    (checkpoint / "README.md").write_text("Mine.")
    (checkpoint / ".cache").mkdir()
    (checkpoint / ".cache" / "model.safetensors").write_text("x")
    (checkpoint / "merged").mkdir()
    shutil.copy(checkpoint / "model.safetensors", checkpoint / "merged")
    with caplog.at_level("WARNING", "rl_plugins"):
        t = run(folder, ["mc_grpo"], 6, resume=True)
    assert t.state.global_step == 6 and not told(caplog)
    assert min(history(t, "rl_plugins/checksum_seconds")) > 0


def test_the_record_names_every_file_of_the_host(folder):
    checkpoint = folder / "out" / "checkpoint-4"
    there = {
        f.relative_to(checkpoint).as_posix(): f.stat().st_size
        for f in checkpoint.rglob("*")
        if f.is_file() and f.parent.name != FOLDER and f.name != "trainer_state.json"
    }
    content = load_state(checkpoint)
    assert {name: size for name, (size, _) in content["files"].items()} == there
    assert {"model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"} <= set(there)
    assert content["seed"] == 0 and content["step"] == 4


def test_a_checkpoint_of_the_model_alone_says_what_begins_anew(tmp_path, caplog):
    run(tmp_path, ["mc_grpo"], 2, save_only_model=True)
    assert not (tmp_path / "out" / "checkpoint-2" / "optimizer.pt").exists()
    with caplog.at_level("WARNING", "rl_plugins"):
        t = run(tmp_path, ["mc_grpo"], 4, resume=True, save_only_model=True)
    assert t.state.global_step == 4
    assert [r.message for r in caplog.records if "saved with save_only_model" in r.message]
    turn_a_bit(tmp_path / "out" / "checkpoint-4" / "model.safetensors", 0.9)
    with raises(StateError, match="model.safetensors has another content"):
        run(tmp_path, ["mc_grpo"], 6, resume=True, save_only_model=True)


def test_methods_may_be_removed_and_the_waiting_groups_are_told(tmp_path, caplog):
    april = dict(method_params={"april": {"over_sampling": 1.5}}, max_completion_length=12)
    run(tmp_path, ["april"], 2, **april)
    waiting = len(load_state(tmp_path / "out" / "checkpoint-2")["carried"])
    assert waiting
    with caplog.at_level("WARNING", "rl_plugins"):
        t = run(tmp_path, [], 4, resume=True, max_completion_length=12)
    assert t.state.global_step == 4
    (line,) = told(caplog)
    tail = f"[april]; this run has methods: []. Loaded: nothing. Dropped: {waiting} waiting groups of `april`."
    assert line.endswith(f"{tail} Starting fresh: nothing.")


def test_methods_of_a_run_without_are_added(tmp_path, caplog):
    run(tmp_path, [], 2)
    with caplog.at_level("WARNING", "rl_plugins"):
        assert run(tmp_path, ["vade"], 4, resume=True).state.global_step == 4
    assert [r.message for r in caplog.records if "made without methods. Starting fresh: vade." in r.message]


def test_a_path_object_is_taken(folder):
    """`Path`, which TRL takes, too."""
    assert run(folder, ["mc_grpo"], 4, resume=Path(folder / "out" / "checkpoint-4")).state.global_step == 4
