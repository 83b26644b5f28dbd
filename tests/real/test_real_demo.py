"""`rl-plugins demo --real` on two layers of the model: it ends with a table, goes on after a kill, repeats nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from rl_plugins.lab.real.model import model_folder

pytestmark = pytest.mark.real

STEPS = 4
DRIVER = f"""
import pathlib, sys
from rl_plugins.lab.compare.comparison import RunOptions
from rl_plugins.lab.real import demo, model

demo.ON_CPU = demo.Size({STEPS}, 8, 4, 4, "float32", r".*layers\\.[01]\\..*_proj", 1e-3)
demo.model_path = lambda dtype: model.model_path(dtype, 2)
demo.model_folder = lambda dtype: model.model_folder(dtype, 2)
demo.demo_real(["gdpo"], RunOptions(pathlib.Path(sys.argv[1]), [0], jobs=2), False)
"""


def log_of(out, arm):
    return [json.loads(line) for line in (out / "runs" / f"{arm}-seed0" / "log.jsonl").read_text().splitlines()]


def test_the_demo_goes_on_after_a_kill_and_ends_with_a_table(tmp_path):
    model_folder(layers=2)
    out = tmp_path / "out"
    command = [sys.executable, "-c", DRIVER, str(out)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "COLUMNS": "200"}
    first = subprocess.Popen(command, env=environment, start_new_session=True, stdout=subprocess.DEVNULL)
    state = out / "runs" / "grpo-seed0" / "trainer" / "checkpoint-2" / "trainer_state.json"
    end = time.monotonic() + 600
    while not state.exists() and first.poll() is None and time.monotonic() < end:
        time.sleep(0.05)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    before = [line for line in log_of(out, "grpo") if line["step"] <= 2]

    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    after = log_of(out, "grpo")
    assert len(before) >= 4 and after[: len(before)] == before  # the first two steps were not trained again
    assert [line["step"] for line in after if "reward" in line] == [*range(1, STEPS + 1)]
    assert [line["step"] for line in after if "eval_reward" in line] == [0, STEPS // 2, STEPS]
    assert [line["seconds"] for line in after] == sorted(line["seconds"] for line in after)
    report = (out / "report.md").read_text()
    assert "| right answers, held out (share), before training |" in report and (out / "curves.png").exists()
    assert "One seed (0): it says nothing about chance." in report

    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert again.returncode == 0 and "All runs are finished" in again.stdout
    assert log_of(out, "grpo") == after
