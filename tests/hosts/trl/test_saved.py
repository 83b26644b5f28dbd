"""Which checkpoint is resumed from: unfinished ones are passed over and named, lost state is told from none."""

from __future__ import annotations

import json
import logging
import shutil
import threading

import pytest
import torch
import yaml
from harness import make, text_score, weights
from messages import raises

from rl_plugins.core.errors import StateError
from rl_plugins.runtime.card_file import card_file
from rl_plugins.trl import checkpoint as module
from rl_plugins.trl.saved import unfinished

pytestmark = pytest.mark.host

OPTIONS = dict(save_strategy="steps", save_steps=2, learning_rate=0.05, max_completion_length=6)


def run(folder, methods, steps, resume=None, **options):
    t = make(folder, methods, max_steps=steps, **{**OPTIONS, **options})
    t.train(resume_from_checkpoint=resume)
    return t


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    """(folder, weights at the end) of a run with checkpoints of the steps 2, 4 and 5."""
    folder = tmp_path_factory.mktemp("saved")
    return folder, weights(run(folder, ["mc_grpo"], 5))


@pytest.fixture
def folder(saved_run, tmp_path):
    shutil.copytree(saved_run[0], tmp_path / "run")
    return tmp_path / "run"


def cut(checkpoint):
    """As a kill leaves it that came before the host's last file."""
    (checkpoint / "trainer_state.json").unlink()


def only_ours(checkpoint):
    for file in checkpoint.iterdir():
        if file.name != "rl_plugins":
            file.unlink()


def half(checkpoint):
    text = (checkpoint / "trainer_state.json").read_text()
    (checkpoint / "trainer_state.json").write_text(text[: len(text) // 2])


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        (cut, "it has no trainer_state.json, which is written last"),
        (only_ours, "it has no trainer_state.json"),
        (half, r"its trainer_state.json cannot be read \(JSONDecodeError\)"),
    ],
)
def test_the_newest_whole_checkpoint_is_resumed_and_the_other_named(saved_run, folder, caplog, damage, why):
    out = folder / "out"
    damage(out / "checkpoint-5")
    named = make(folder, ["mc_grpo"], max_steps=5, **OPTIONS)
    with raises(StateError, match=rf"checkpoint-5.*{why}.*checkpoint-4"):
        named.train(resume_from_checkpoint=str(out / "checkpoint-5"))
    with raises(StateError, match=r"no checkpoint .*checkpoint-7\..*checkpoint-4.*resume_from_checkpoint"):
        named.train(resume_from_checkpoint=str(out / "checkpoint-7"))
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        named.train(resume_from_checkpoint=True)
    (line,) = [r.message for r in caplog.records if "Skipped" in r.message]
    assert line.startswith(
        f"Resuming from {out / 'checkpoint-4'}. Skipped, because a save was cut off: checkpoint-5: it"
    )
    assert torch.equal(weights(named), saved_run[1])
    assert unfinished(out / "checkpoint-5", 1) is None, "it was saved once more"


def test_without_any_whole_checkpoint_the_error_says_so(folder):
    for name in ("checkpoint-2", "checkpoint-4", "checkpoint-5"):
        cut(folder / "out" / name)
    with raises(StateError, match=r"checkpoint-2"):
        run(folder, ["mc_grpo"], 5, resume=True)


def test_without_any_checkpoint_the_host_refuses(tmp_path):
    with pytest.raises(ValueError, match="No valid checkpoint found"):
        run(tmp_path, ["mc_grpo"], 5, resume=True)


def test_a_checkpoint_of_several_ranks_lacks_what_one_of_them_did_not_write(folder):
    checkpoint = folder / "out" / "checkpoint-5"
    (checkpoint / "rng_state.pth").rename(checkpoint / "rng_state_0.pth")
    made_by(2, checkpoint)
    assert unfinished(checkpoint, 2) == unfinished(checkpoint, 1) == "it has no rng_state_1.pth"
    shutil.copy(checkpoint / "rng_state_0.pth", checkpoint / "rng_state_1.pth")
    assert unfinished(checkpoint, 2) is None
    assert unfinished(checkpoint, 4) is None, "it is whole, whoever resumes it"
    checkpoint.rename(checkpoint.with_name("checkpoint-9"))
    assert unfinished(checkpoint.with_name("checkpoint-9"), 2) == "its trainer_state.json is of step 5"


@pytest.mark.parametrize(
    ("processes", "options", "words"),
    [
        (1, {}, ()),
        (1, {"gradient_accumulation_steps": 2}, ()),  # of half the rows
        (2, {}, ("with 2 processes",)),
        (1, {"per_device_train_batch_size": 32}, ("with 8 prompts per optimizer step, and this run has 4",)),
        (2, {"num_generations": 4}, ("with 2 processes", "and this run has 16")),
    ],
)
def test_a_resume_with_other_sizes_says_what_changes(folder, caplog, processes, options, words):
    made_by(processes, folder / "out" / "checkpoint-4")
    with caplog.at_level("WARNING", "rl_plugins"):
        run(folder, ["mc_grpo"], 5, resume=str(folder / "out" / "checkpoint-4"), **options)
    told = [r.message for r in caplog.records if r.name == "rl_plugins" and "was made with" in r.message]
    assert len(told) == bool(words) and all(word in told[0] for word in words)


def made_by(processes, checkpoint):
    """Another number of processes in the note of a checkpoint."""
    file = checkpoint / "trainer_state.json"
    state = json.loads(file.read_text())
    assert state["stateful_callbacks"]["rl_plugins"]["attributes"]["processes"] == 1
    state["stateful_callbacks"]["rl_plugins"]["attributes"]["processes"] = processes
    file.write_text(json.dumps(state))


def test_while_a_checkpoint_is_saved_it_is_unfinished_and_never_ours_alone(folder, monkeypatch):
    """Also where an older one of that name was whole."""
    checkpoint, seen = folder / "out" / "checkpoint-5", []
    save = module.save_run

    def watched(where, *args, **kwargs):
        assert str(checkpoint) == where
        seen.append([(checkpoint / name).exists() for name in ("model.safetensors", "trainer_state.json")])
        save(where, *args, **kwargs)
        raise KeyboardInterrupt

    monkeypatch.setattr(module, "save_run", watched)
    before = json.loads((checkpoint / "trainer_state.json").read_text())
    assert before["global_step"] == 5
    with pytest.raises(KeyboardInterrupt):
        run(folder, ["mc_grpo"], 5, resume=str(folder / "out" / "checkpoint-4"))
    assert seen == [[True, False]] and unfinished(checkpoint, 1)


def test_a_finished_run_that_is_started_again_trains_nothing(saved_run, folder):
    t = run(folder, ["mc_grpo"], 5, resume=True)
    assert t.state.global_step == 5 and torch.equal(weights(t), saved_run[1]) and t.methods.batch == 5
    assert run(folder, ["mc_grpo"], 6, resume=True).state.global_step == 6


# ---- lost state, and none


def test_a_lost_folder_is_an_error_for_every_run(folder):
    shutil.rmtree(folder / "out" / "checkpoint-5" / "rl_plugins")
    for methods in (["mc_grpo"], ["filter"], ["vade"]):
        with raises(StateError, match=r"checkpoint-5.*`rl_plugins`"):
            run(folder, methods, 6, resume=True)


def test_a_plain_checkpoint_is_no_lost_one(tmp_path, caplog):
    """Made by TRL's own trainer, or by one without methods that went on from a checkpoint with methods."""
    run(tmp_path, ["mc_grpo"], 2)
    t = make(tmp_path, stock=True, max_steps=4, **OPTIONS)
    t.train(resume_from_checkpoint=True)
    assert not (tmp_path / "out" / "checkpoint-4" / "rl_plugins").exists()
    for methods in (["mc_grpo"], ["over"], ["filter"], ["v0_5"], ["vade"]):
        again = make(tmp_path, methods, max_steps=5, **{**OPTIONS, "save_strategy": "no"})
        caplog.clear()
        again.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-4"))
        assert again.methods.batch == 5 and again.state.global_step == 5
        anew = [r.message for r in caplog.records if "made without methods. Starting fresh: " in r.message]
        assert len(anew) == (methods[0] in ("v0_5", "vade"))


def test_parameters_that_are_objects_are_logged_and_saved_by_their_name(tmp_path):
    """A client with a lock, and a class of a function: neither can be pickled, and no logger takes them."""

    class Client:
        def __init__(self):
            self.lock = threading.Lock()

        def __call__(self, text):
            return "x"

    client = Client()
    params = {"training_free_grpo": {"llm": client}}
    t = make(
        tmp_path,
        ["training_free_grpo"],
        method_params=params,
        reward=text_score,
        max_steps=1,
        save_strategy="steps",
        save_steps=1,
    )
    t.train()
    saved = torch.load(tmp_path / "out" / "checkpoint-1" / "training_args.bin", weights_only=False)
    for told in (saved.method_params, json.loads(t.args.to_json_string())["method_params"]):
        name = told["training_free_grpo"]["llm"]
        assert name.startswith("test_saved:") and name.endswith("Client")
    assert t.args.method_params["training_free_grpo"]["llm"] is client


def test_the_model_card_names_the_methods(folder, tmp_path):
    """TRL writes it with every checkpoint, and writes it anew: what we add stands in it once."""
    card = (folder / "out" / "README.md").read_text(encoding="utf-8")
    paper = card_file("mc_grpo").paper
    assert card.count("## Methods") == 1 and paper.url in card and paper.bibtex("mc_grpo") in card
    t = make(tmp_path, ["mc_grpo", "dars"], method_params={"mc_grpo": {"advantage_clip": 3.0}})
    t.create_model_card(model_name="tiny")
    card = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    given = yaml.safe_load(card.split("```yaml")[1].split("```")[0])
    assert given["method_params"]["mc_grpo"]["advantage_clip"] == 3.0
    again = make(tmp_path, **given).methods  # the block is a config
    assert again.names == t.methods.names and [m.params for m in again.methods] == [m.params for m in t.methods.methods]
    make(tmp_path, trace=True).create_model_card(model_name="tiny")
    assert "rl-plugins" not in (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
