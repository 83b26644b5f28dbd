"""The examples on reasoning-gym as a user starts them, on two layers of the real model, two steps: the script, its
config, the notebook and verl's script."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas
import pyarrow.parquet as pq
import pytest
import yaml
from safetensors.torch import load_file
from waiting import NEVER

from rl_plugins.lab.demo import verl_data
from rl_plugins.lab.real.model import model_folder

pytestmark = [pytest.mark.real, pytest.mark.host]
EXAMPLES = Path(__file__).parents[2] / "examples"
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
HELD_OUT = 6
SMALL = {
    "max_steps": 2,
    "per_device_train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "num_generations": 4,
    "max_completion_length": 8,
    "per_device_eval_batch_size": HELD_OUT,
}
SHOWN = re.compile(r"held-out accuracy (\w+): (\d\.\d+) of (\d+) questions")


def run(folder: Path, *words: Any, **environment: str) -> str:
    """What a command prints. The examples run in a folder of their own, as the user's."""
    done = subprocess.run(
        [*map(str, words)],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=NEVER,
        env={**os.environ, **ENVIRONMENT, **environment},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def words(values: dict[str, Any]) -> list[str]:
    return [word for name, value in values.items() for word in (f"--{name}", str(value))]


def model() -> Path:
    return model_folder("float32", layers=2)


def check_trace(folder: Path) -> pandas.DataFrame:
    """Two batches of rollouts, with the advantages of GRPO and those that were trained."""
    rows = pandas.read_parquet(folder / "trace" / "rollouts")
    assert sorted(set(rows["batch"])) == [0, 1]
    assert {"solved", "brief"} == {reward["name"] for rewards in rows["rewards"] for reward in rewards}
    return rows


@pytest.mark.parametrize("methods", ["gdpo", "vade", ""])
def test_the_script_trains_an_adapter_with_the_methods_that_are_named(tmp_path, methods):
    more = SMALL | {"train_rows": 40, "held_out_rows": HELD_OUT, "methods": methods, "model_name_or_path": model()}
    out = run(tmp_path, sys.executable, EXAMPLES / "trl" / "train_reasoning_gym.py", *words(more))
    assert [(when, n) for when, _, n in SHOWN.findall(out)] == [("before", "6"), ("after", "6")]
    acted = {"gdpo": r"'gdpo/max_abs_advantage': '?[\d.]*[1-9]", "vade": r"'vade/"}
    assert {name for name, value in acted.items() if len(re.findall(value, out)) >= 2} == set(methods.split())
    made = tmp_path / "reasoning-gym-run"
    rows = check_trace(made)
    assert len(rows) == 2 * 16
    assert ((rows["grpo"] - rows["advantage"]).abs().max() > 1e-3) == (methods == "gdpo")
    weights = load_file(made / "adapter_model.safetensors")
    assert len({n.split(".lora_")[0] for n in weights}) == 2 * 7  # every linear layer but the head
    assert all(w.abs().max() > 0 for w in weights.values())  # a B begins at 0


def test_the_config_runs_the_same_without_a_script(tmp_path):
    run(tmp_path, sys.executable, EXAMPLES / "trl" / "reasoning_gym_data.py", "reasoning-gym")
    few = tmp_path / "reasoning-gym" / "test.jsonl"
    few.write_text("".join(few.read_text().splitlines(keepends=True)[:HELD_OUT]))
    values = yaml.safe_load((EXAMPLES / "trl" / "reasoning_gym.yaml").read_text())
    values |= SMALL | {"model_name_or_path": str(model()), "eval_steps": 2}
    values |= {"dtype": "float32", "bf16": False, "use_cpu": True}  # the CPU
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(values))
    program = (sys.executable, "-m", "rl_plugins.commands.cli", "trl", "grpo", "--config", "run.yaml")
    assert run(tmp_path, *program, "--dry-run").endswith("No problem found.\n")
    out = run(tmp_path, *program)
    assert len(re.findall(r"'eval_rewards/solved/mean': '?\d", out)) == 2
    assert len(re.findall(r"'gdpo/max_abs_advantage': '?[\d.]*[1-9]", out)) == 2
    assert len(check_trace(tmp_path / "reasoning-gym-run")) == 2 * 16


def test_the_notebook_runs_cell_by_cell(tmp_path, monkeypatch):
    """As papermill does it: the cell of parameters, then other values, then the rest as it is."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(EXAMPLES / "trl" / "reasoning_gym.ipynb", 4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)  # kept without outputs
    (place,) = [i for i, cell in enumerate(book.cells) if "parameters" in cell.metadata.get("tags", ())]
    names = {line.split(" = ")[0] for line in book.cells[place].source.splitlines() if " = " in line}
    mine = dict(MODEL=str(model()), STEPS=2, PROMPTS=4, ROLLOUTS=4, MICRO_BATCH=8, LENGTH=8, HELD_OUT=HELD_OUT)
    assert mine.keys() < names
    lines = [f"{name} = {value!r}" for name, value in mine.items()]
    book.cells.insert(place + 1, nbformat.v4.new_code_cell("\n".join(lines)))
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)
    NotebookClient(book, timeout=NEVER, resources={"metadata": {"path": str(tmp_path)}}).execute()
    printed = "".join(output.get("text", "") for cell in code for output in cell.outputs)
    assert [(when, n) for when, _, n in SHOWN.findall(printed)] == [("before", "6"), ("after", "6")]
    tables = [output.data["text/plain"] for cell in code[-2:] for output in cell.outputs if "data" in output]
    assert "gdpo/max_abs_advantage" in tables[0] and "advantage" in tables[1]
    assert len(check_trace(tmp_path / "reasoning-gym-run")) == 2 * 16


# Of the demo's run in verl: what a CPU needs, in place of GPUs and vLLM.
ON_A_CPU = re.compile(
    r"device|dtype|compile|attn_|padding|gradient_checkp|num_workers|storage_units|ray_init|rollout.name"
)


def test_the_script_of_verl_trains_with_the_method(tmp_path):
    script, data = EXAMPLES / "verl" / "reasoning_gym.sh", tmp_path / "data"
    run(tmp_path, sys.executable, EXAMPLES / "verl" / "reasoning_gym_data.py", data)
    pq.write_table(pq.read_table(data / "test.parquet").slice(0, HELD_OUT), data / "test.parquet")
    given = dict(MODEL=str(model()), DATA=str(data), STEPS="2", PYTHON=sys.executable)
    told = run(tmp_path, "bash", script, "--dry-run", **given)
    assert told.endswith("No problem found.\n") and "solved (weight 1), brief (weight 0.5)" in told
    cpu = [line for line in verl_data.overrides(data, model(), tmp_path) if ON_A_CPU.search(line.split("=")[0])]
    actor = "actor_rollout_ref.actor."
    small = ["data.train_batch_size=4", f"{actor}ppo_mini_batch_size=4", f"{actor}ppo_micro_batch_size_per_gpu=8"]
    small += ["actor_rollout_ref.rollout.n=4", "data.max_response_length=8", "trainer.test_freq=2"]
    equal = {"RAY_worker_niceness": "0"}  # 15 by default: other tests would come first
    out = run(tmp_path, "bash", script, *cpu, *small, **given, **verl_data.ENVIRONMENT, **equal)
    assert len(re.findall(r"gdpo/max_abs_advantage:[\d.]*[1-9]", out)) == 2, out[-3000:]
    assert set(re.findall(r"val-\w+/(\w+)/solved/mean@1:(?:np.float64\()?\d", out)) == {
        "chain_sum",
        "products",
        "leg_counting",
    }
    assert len(check_trace(tmp_path / "reasoning-gym-run" / "checkpoints")) == 2 * 16
