"""Kill a run and resume it: the same decisions, the same weights; state that does not fit is refused."""

from __future__ import annotations

import json
import os
import shutil
import signal

import clean_processes
import probes
import pytest
import torch
from harness import history, make, weights
from messages import raises
from transformers import TrainerCallback
from waiting import NEVER

from rl_plugins import __version__
from rl_plugins.core.errors import StateError
from rl_plugins.lab.demo.tasks import build_dataset
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.trl import GRPOConfig
from rl_plugins.trl.commands.doctor import print_run, print_script

pytestmark = pytest.mark.host

CORRIDOR = {"epo": {"average": "host", "entropy_coeff": 0.1, "kl": 0.95, "kr": 1.05, "rho": 2.0}}


class Kill(TrainerCallback):
    """SIGKILL right after an optimizer step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(folder, methods=("counter",), **options):
    defaults = dict(
        max_steps=8,
        save_strategy="steps",
        save_steps=3,
        learning_rate=0.05,
        optim="adamw_torch",
        per_device_train_batch_size=32,
        num_generations=8,
    )
    return make(folder, list(methods), **{**defaults, **options})


def train_and_kill(folder, kill, options):
    probes.register()
    trainer(folder, callbacks=[Kill(kill)], **options).train()


def checkpoints(folder):
    return sorted(int(p.name.split("-")[1]) for p in (folder / "out").glob("checkpoint-*"))


@pytest.mark.parametrize(
    ("options", "kill", "saved", "resumed_from"),
    [
        ({}, 5, [3], 3),
        (dict(num_iterations=2, methods=("counter", "epo"), method_params=CORRIDOR), 5, [4], 4),
        (dict(steps_per_generation=2, gradient_accumulation_steps=1, per_device_train_batch_size=16), 7, [4, 6], 6),
    ],
)
def test_killed_and_resumed_is_uninterrupted(tmp_path, options, kill, saved, resumed_from):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir(), killed.mkdir()
    a = trainer(whole, **options)
    a.train()

    child = clean_processes.clean().Process(target=train_and_kill, args=(killed, kill, options))
    child.start()
    child.join(NEVER)
    assert child.exitcode == -signal.SIGKILL
    assert checkpoints(killed) == saved, "saves inside a generation batch wait for its end"

    b = trainer(killed, **options)
    b.train(resume_from_checkpoint=True)
    state_a, state_b = (t.methods.methods[0].state for t in (a, b))
    assert state_a["stream"] == state_b["stream"] and state_a["steps"] == state_b["steps"]
    assert torch.equal(state_a["seen"], state_b["seen"])
    assert torch.equal(weights(a), weights(b))
    for one, other in zip(a.methods.methods[1:], b.methods.methods[1:], strict=True):  # the corridor's history
        assert one.state["count"].tolist() == other.state["count"].tolist() == [4]
        assert torch.equal(one.state["sum"], other.state["sum"])
        assert min(history(a, "epo/within")) < 0.9
    assert not any(p.suffix in (".pt", ".pkl", ".bin") for p in (killed / "out").glob("checkpoint-*/rl_plugins/*"))


def test_resume_of_the_first_methods(tmp_path):
    """vade and mc_grpo together, with the generator of transformers."""
    runs = {}
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    runs["whole"] = trainer(tmp_path / "whole", ("vade", "mc_grpo"), max_steps=5)
    runs["whole"].train()
    trainer(tmp_path / "parts", ("vade", "mc_grpo"), max_steps=3).train()
    runs["parts"] = trainer(tmp_path / "parts", ("vade", "mc_grpo"), max_steps=5)
    runs["parts"].train(resume_from_checkpoint=True)
    assert torch.equal(weights(runs["whole"]), weights(runs["parts"]))


def test_last_save_inside_a_batch_is_written_and_marked(tmp_path, monkeypatch):
    """The state in it is that of the boundary, though `counter` changes its tensor, list and number in place."""
    after, observe = [], probes.Counter.observe

    def watched(self, rollouts, tokens, stats):
        observe(self, rollouts, tokens, stats)
        self.state["seen"].numpy()[-1] += 1  # as a method may, too
        after.append((self.state["seen"].clone(), list(self.state["stream"])))

    monkeypatch.setattr(probes.Counter, "observe", watched)
    t = trainer(tmp_path, max_steps=5, num_iterations=2, save_steps=100)
    t.train()
    assert checkpoints(tmp_path) == [5]
    state = load_state(tmp_path / "out" / "checkpoint-5")["methods"]["counter"]["state"]
    assert torch.equal(state["seen"], after[1][0]) and not torch.equal(state["seen"], after[2][0])
    assert state["stream"] == after[1][1] != after[2][1] == t.methods.methods[0].state["stream"]
    saved = load_state(tmp_path / "out" / "checkpoint-5")
    assert saved["inside_generation_batch"] and saved["batch"] == 2
    assert saved["methods"]["counter"]["state"]["steps"] == 2 and t.methods.methods[0].state["steps"] == 3
    again = trainer(tmp_path, max_steps=8, num_iterations=2, save_steps=100)
    again.train(resume_from_checkpoint=True)
    assert again.methods.methods[0].state["stream"][2] == t.methods.methods[0].state["stream"][2]


@pytest.fixture(scope="module")
def saved_run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    trainer(folder, max_steps=3).train()
    return folder


@pytest.fixture
def run_folder(saved_run, tmp_path):
    shutil.copytree(saved_run, tmp_path / "run")
    return tmp_path / "run"


def refuse(folder, match, methods=("counter",), **options):
    before = {p: p.read_bytes() for p in (folder / "out").rglob("*") if p.is_file()}
    t = trainer(folder, methods, **options)
    with raises(StateError, match=match):
        t.train(resume_from_checkpoint=True)
    assert t.state.global_step in (0, 3) and checkpoints(folder) == [3]
    assert all(p.read_bytes() == content for p, content in before.items()), "nothing may be overwritten"


def test_corrupt_state_is_refused(run_folder):
    file = run_folder / "out/checkpoint-3/rl_plugins/state.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"x")
    refuse(run_folder, "cannot be read: .*another checkpoint")


def test_truncated_state_is_refused(run_folder):
    file = run_folder / "out/checkpoint-3/rl_plugins/state.json"
    file.write_text(file.read_text()[:50])
    refuse(run_folder, "cannot be read: ")


def test_state_of_an_older_format_is_refused_with_both_ways_on(run_folder):
    file = run_folder / "out/checkpoint-3/rl_plugins/state.json"
    file.write_text(file.read_text().replace('"format": 3', '"format": 2', 1))
    refuse(run_folder, f"format 2.*format 3.*rl-plugins {__version__}.*that wrote it.*new run from the weights")


@pytest.mark.parametrize("newest", [True, "True", "true"])
def test_the_same_methods_say_what_they_load(run_folder, capsys, newest):
    """The newest checkpoint, also as a command line writes it."""
    trainer(run_folder, max_steps=4, trace=True).train(resume_from_checkpoint=newest)
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "was made with methods" in one]
    assert "Loaded: state of `counter` (" in line and line.endswith("Dropped: nothing. Starting fresh: nothing.")


def test_the_doctor_says_what_a_resume_would_load_and_refuse(run_folder, capsys, caplog):
    (run_folder / "data").mkdir()
    build_dataset(200, seed=1).to_parquet(str(run_folder / "data/train.parquet"))
    options = dict(
        model_name_or_path=str(run_folder / "policy"), dataset_name=str(run_folder / "data"), use_cpu=True, bf16=False,
        output_dir=str(run_folder / "out"), reward_funcs=["rl_plugins.lab.demo.rewards.exact"], max_steps=8, seed=0,
        per_device_train_batch_size=32, num_generations=8, max_completion_length=14, report_to="none", optim="sgd",
        resume_from_checkpoint="true",
    )  # fmt: skip

    def told(methods, **changes):
        (run_folder / "run.yaml").write_text(json.dumps({**options, **changes, "methods": methods}))
        problems = print_run(["--config", str(run_folder / "run.yaml")], None)
        return "\n".join(problems), capsys.readouterr().out + caplog.text

    def of_script(**changes):
        values = {
            k: v for k, v in {**options, "trace": True, **changes}.items() if k in GRPOConfig.__dataclass_fields__
        }
        lines = [
            "from rl_plugins.lab.demo.rewards import exact",
            "from rl_plugins.lab.demo.tasks import build_dataset",
            "from rl_plugins.trl import GRPOConfig, GRPOTrainer",
            f"args = GRPOConfig(**{values})",
            f"trainer = GRPOTrainer({options['model_name_or_path']!r}, exact, args, build_dataset(200, seed=1))",
            "trainer.train(resume_from_checkpoint=True)",
        ]
        (run_folder / "mine.py").write_text("\n".join(lines))
        caplog.clear()
        problems = print_script(run_folder / "mine.py", [])
        return "\n".join(problems), capsys.readouterr().out + caplog.text

    problems, text = told(["counter"])
    assert not problems and "checkpoint-3 (step 3" in text and "Loaded: state of `counter` (" in text
    problems, text = of_script(methods=["counter"])
    assert not problems and text.count("Loaded: state of `counter` (") == 1 and not (run_folder / "out/trace").exists()
    problems, text = told(["noop"], num_generations=4)
    assert not problems and "Dropped: state of `counter` (" in text and "4 prompts per optimizer step" in text
    assert "Dropped: state of `counter` (" in told([])[1]
    assert "seed 0, and this run has seed 7" in told(["counter"], seed=7)[0]
    assert "nowhere" in told(["counter"], resume_from_checkpoint="nowhere")[0]
    assert str(run_folder / "new") in told(["counter"], output_dir=str(run_folder / "new"))[0]
    file = run_folder / "out/checkpoint-3/rl_plugins/state.json"
    file.write_text(file.read_text()[:50])
    assert "cannot be read" in told(["counter"])[0]
    assert "Resume" not in told(["counter"], resume_from_checkpoint=None)[1]


def test_state_of_other_methods_is_dropped_in_one_line(run_folder, caplog):
    t = trainer(run_folder, ("noop",), max_steps=4)
    with caplog.at_level("WARNING", "rl_plugins"):
        t.train(resume_from_checkpoint=True)
    (line,) = [r.message for r in caplog.records if r.name == "rl_plugins"]
    assert "[counter]; this run has methods: [noop]. Loaded: nothing. Dropped: state of `counter` (" in line
    assert line.endswith("Starting fresh: noop.") and f"step 3, rl-plugins {__version__}" in line
    assert t.state.global_step == 4


def test_missing_state_is_refused(run_folder):
    shutil.rmtree(run_folder / "out/checkpoint-3/rl_plugins")
    refuse(run_folder, r"checkpoint-3.*`rl_plugins`")


def test_state_of_another_dataset_is_refused(run_folder):
    refuse(run_folder, "`counter`", dataset=build_dataset(150, seed=2))


def test_state_with_other_parameters_is_refused(run_folder):
    checkpoint = run_folder / "out/checkpoint-3"
    content = load_state(checkpoint)
    content["methods"]["counter"]["params"] = {"x": 1}
    save_state(checkpoint, content)
    refuse(run_folder, r"`counter`.*1")


def test_the_state_of_another_checkpoint_is_refused(run_folder):
    checkpoint = run_folder / "out/checkpoint-3"
    content = load_state(checkpoint)
    assert content["step"] == 3
    save_state(checkpoint, {**content, "step": 2})
    refuse(run_folder, "2.*3")


def test_a_changed_dataset_is_refused_whichever_rows_changed(run_folder):
    answers = list(build_dataset(200, seed=1)["answer"])
    answers[101] = answers[101] + "0"
    changed = build_dataset(200, seed=1).remove_columns("answer").add_column("answer", answers)
    refuse(run_folder, "`counter`", dataset=changed)
