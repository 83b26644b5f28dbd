"""The README's examples and verl's command on its page run as printed; the example configs take effect."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from waiting import NEVER

ROOT = Path(__file__).parents[1]


@pytest.mark.ranks
@pytest.mark.host
def test_the_script_takes_effect_and_trains_in_two_processes_as_printed(tmp_path, monkeypatch, capsys):
    """The doctor of scripts on it, and the command that starts two processes, each of which makes its 64 rows."""
    from rl_plugins.commands.doctor import examine_script

    page = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "mine.py").write_text(example)
    monkeypatch.chdir(tmp_path)
    assert examine_script(Path("mine.py"), []) == []
    told = capsys.readouterr().out
    assert "64 of 64" in told and "each of 1 process per" in told
    (command,) = re.findall(r"^torchrun (.*mine\.py)", page, re.M)
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *shlex.split(command)],
        capture_output=True,
        text=True,
        timeout=NEVER,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("methods in effect") == 1 and "'vade/seen'" in done.stdout
    assert re.findall(r"'rl_plugins/rows_made': '?(\d+)", done.stdout) == [str(128 * n) for n in range(1, 6)]


@pytest.mark.host
def test_the_command_of_verls_page_takes_effect_as_printed(tmp_path):
    """The doctor and verl's own check have nothing to add to it; what of the user's is not here (data, model) is a
    note."""
    from verl.utils.config import validate_config

    from rl_plugins.verl.config import compose

    (command,) = re.findall(
        r"^python -m verl.trainer.main_ppo (?:.*\\\n)*.*", (ROOT / "docs" / "verl.md").read_text(), re.M
    )
    words = shlex.split(command.replace("\\\n", " "))
    validate_config(compose(words[3:]), use_reference_policy=False, use_critic=False)
    done = subprocess.run(
        [sys.executable, "-m", "rl_plugins.commands.cli", "doctor", "--host", "verl", "--", *words],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=NEVER,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0 and done.stdout.endswith("No problem found.\n"), done.stdout[-2000:] + done.stderr


def test_files_named_in_the_readme_exist():
    text = (ROOT / "README.md").read_text()
    for target in re.findall(r"\]\(([^)#]+)\)", text):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


TRL_EXAMPLES = ROOT / "examples" / "trl"


@pytest.mark.host
def test_example_config_of_gsm8k_is_one_that_the_command_takes(tmp_path, monkeypatch, capsys):
    """Everything but the model and the GPUs: every key, names, parameters, rewards, columns, options (seen: the key
    `model`, which `trl grpo` does not know)."""
    from rl_plugins.commands.doctor import examine

    for file in ("gsm8k.yaml", "gsm8k_data.py"):
        shutil.copy(TRL_EXAMPLES / file, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    import gsm8k_data

    row = gsm8k_data.to_row({"question": "1+1?", "answer": "It is 2. #### 1,234"})
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "train.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
    assert not examine(Path("gsm8k.yaml"), [], None, world_size=4)
    text = capsys.readouterr().out
    assert re.search(r"^  gdpo ", text, re.M) and "128 of 128" in text
    assert "columns are not checked" not in text
    answer = [{"role": "assistant", "content": "so \\boxed{1,234}"}]
    assert gsm8k_data.correct([answer], [row["answer"]]) == [1.0] and gsm8k_data.boxed_once([answer]) == [1.0]


@pytest.mark.host
def test_the_script_of_reasoning_gym_and_its_config_are_one_run(tmp_path, monkeypatch, capsys):
    """Without a model, a GPU and reasoning-gym: the script's help and defaults, and everything of its config but these.
    `tests/real` runs both, the notebook, too."""
    from rl_plugins.commands.doctor import examine

    monkeypatch.syspath_prepend(str(TRL_EXAMPLES))
    script = runpy.run_path(str(TRL_EXAMPLES / "train_reasoning_gym.py"))
    values = yaml.safe_load((TRL_EXAMPLES / "reasoning_gym.yaml").read_text())
    same = script["DEFAULTS"] | {"trace": True}
    assert {name: values.get(name) for name in same} == same
    assert values["reward_funcs"] == [f"{f.__module__}.{f.__name__}" for f in (script["solved"], script["brief"])]
    monkeypatch.setattr(sys, "argv", ["train_reasoning_gym.py", "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(TRL_EXAMPLES / "train_reasoning_gym.py"), run_name="__main__")
    assert end.value.code == 0 and "--methods METHODS [METHODS ...]" in capsys.readouterr().out

    shutil.copy(TRL_EXAMPLES / "reasoning_gym.yaml", tmp_path)
    row = {"prompt": [{"role": "user", "content": "1 + 1?"}], "task": "chain_sum", "entry": "{}", "answer": "2"}
    for split in ("train", "test"):
        (tmp_path / "reasoning-gym").mkdir(exist_ok=True)
        (tmp_path / "reasoning-gym" / f"{split}.jsonl").write_text(f"{json.dumps(row)}\n" * 64)
    monkeypatch.chdir(tmp_path)
    assert not examine(Path("reasoning_gym.yaml"), [], None, world_size=1)
    text = capsys.readouterr().out
    assert "64 of 64" in text and "columns are not checked" not in text


@pytest.mark.host
def test_run_yaml_runs_on_a_laptop_as_it_is(tmp_path):
    """The config of the examples is the one that the command writes, and TRL trains with it on a CPU."""
    from rl_plugins.lab.demo import trl_data

    example = (TRL_EXAMPLES / "run.yaml").read_text()
    assert trl_data.write(tmp_path / "other place").read_text() == example.replace(
        "laptop-run", str(tmp_path / "other place")
    )
    (tmp_path / "other place").rename(tmp_path / "laptop-run")
    (tmp_path / "run.yaml").write_text(example)
    command = [
        "-m",
        "rl_plugins.commands.cli",
        "trl",
        "grpo",
        "--config",
        "run.yaml",
        "--max_steps",
        "2",
        "--logging_steps",
        "1",
    ]
    done = subprocess.run(
        [sys.executable, *command, "--eval_strategy", "no"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=NEVER,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert len(re.findall(r"'gdpo/max_abs_advantage': '?[1-9]", done.stdout)) == 2  # gdpo acted in both steps
    assert "rl-plugins: methods in effect, in this order" in done.stdout
    assert (tmp_path / "laptop-run" / "out" / "checkpoint-2" / "rl_plugins").is_dir()
    assert (tmp_path / "laptop-run" / "out" / "model.safetensors").exists()
