"""What a run of verl on a CPU takes: processes, memory, and how far rollout and trainer differ.

    python benchmarks/verl_cpu.py                    # both runs, into verl_cpu.json and the table of docs/verl_cpu.md
    python benchmarks/verl_cpu.py --only demo

One step of verl's real trainer `sync` with the embedded policy, then with SmolLM2-135M-Instruct on reasoning-gym.
Memory is the largest sum of the proportional set sizes (PSS) of all processes: a page that several share counts once.
The sum of their RSS, which counts it in each, is beside it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import Any

import psutil
import pyarrow
import pyarrow.parquet
import typer
from safetensors import safe_open

from rl_plugins.environments import reasoning_gym
from rl_plugins.lab.demo import verl_data
from rl_plugins.lab.demo.policy import load_policy
from rl_plugins.lab.real.model import model_folder

FILE = Path(__file__).with_name("verl_cpu.json")
PAGE = Path(__file__).parents[1] / "docs" / "verl_cpu.md"
BEGIN, END = "<!-- made by benchmarks/verl_cpu.py: begin -->", "<!-- made by benchmarks/verl_cpu.py: end -->"
MARK = "RL_PLUGINS_MEASURED"
STEPS = 1
TASKS: dict[str, dict[str, Any]] = {"chain_sum": {"min_terms": 2, "max_terms": 2, "max_digits": 1}, "gcd": {}}
PROMPTS, SAMPLES, PROMPT, RESPONSE = 2, 4, 96, 16
SHOWN = {
    "parameters": "parameters",
    "processes": "processes",
    "pss_gb": "memory (PSS), GB",
    "rss_gb": "sum of RSS, GB",
    "cpu_seconds": "CPU seconds, start-up and a step",
    "probs_diff": "largest difference of a sampled token's probability",
}


def demo(folder: Path) -> list[str]:
    return verl_data.overrides(verl_data.write(folder / "data"), load_policy(), folder, steps=STEPS, test_every=-1)


def real(folder: Path) -> list[str]:
    rows = reasoning_gym.verl_rows(reasoning_gym.rows(TASKS, PROMPTS * STEPS))
    (folder / "data").mkdir()
    file = folder / "data" / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
    (folder / "data" / "test.parquet").write_bytes(file.read_bytes())
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    changed = {
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": RESPONSE,
        f"{rollout}.n": SAMPLES,
        f"{actor}.ppo_mini_batch_size": PROMPTS,
        f"{actor}.ppo_micro_batch_size_per_gpu": SAMPLES,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": SAMPLES,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": SAMPLES,
        f"{actor}.optim.lr": 1e-6,
        "reward.custom_reward_function.path": "pkg://rl_plugins.environments.reasoning_gym",
    }
    lines = verl_data.overrides(folder / "data", model_folder(), folder, steps=STEPS, test_every=-1)
    return [line for line in lines if line.split("=")[0] not in changed] + [f"{k}={v}" for k, v in changed.items()]


def processes(mark: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                found.append(process)
    return found


def measured(lines: list[str], model: Path, folder: Path) -> dict[str, Any]:
    mark = uuid.uuid4().hex
    metrics = folder / "metrics.jsonl"
    env = {**os.environ, **verl_data.ENVIRONMENT, MARK: mark, "VERL_FILE_LOGGER_PATH": str(metrics), "SPT_NOENV": "1"}
    pss, rss, most, seconds = 0.0, 0.0, 0, {}
    with (folder / "log.txt").open("wb") as log:
        command = [sys.executable, "-m", "verl.trainer.main_ppo", *lines, "trainer.val_before_train=False"]
        run = subprocess.Popen(command, cwd=folder, env=env, stdout=log, stderr=subprocess.STDOUT)
    while run.poll() is None:
        told = []
        for process in processes(mark):
            with contextlib.suppress(psutil.Error):
                told.append(process.memory_full_info())
                seconds[process.pid] = sum(process.cpu_times()[:2])
        pss = max(pss, sum(t.pss for t in told) / 1e9)
        rss = max(rss, sum(t.rss for t in told) / 1e9)
        most = max(most, len(told))
        time.sleep(2)
    for process in processes(mark):  # daemons of Ray
        with contextlib.suppress(psutil.Error):
            process.kill()
    if run.returncode:
        raise SystemExit((folder / "log.txt").read_text(errors="replace")[-4000:])
    steps = [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
    with safe_open(model / "model.safetensors", "pt") as weights:
        parameters = sum(math.prod(weights.get_slice(key).get_shape()) for key in weights.keys())  # noqa: SIM118
    return {
        "parameters": parameters,
        "processes": most,
        "pss_gb": round(pss, 2),
        "rss_gb": round(rss, 2),
        "cpu_seconds": round(sum(seconds.values())),
        "probs_diff": max(
            s["training/rollout_probs_diff_max"] for s in steps if "training/rollout_probs_diff_max" in s
        ),
    }


def table(found: dict[str, dict[str, Any]]) -> str:
    names = {"demo": "embedded policy", "real": "SmolLM2-135M"}
    lines = ["| | " + " | ".join(names[k] for k in found) + " |", "|---|" + "---|" * len(found)]
    for key, text in SHOWN.items():
        cells = [f"{f[key]:.1e}" if key == "probs_diff" else f"{f[key]:,}" for f in found.values()]
        lines.append(f"| {text} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(only: str = typer.Option("", help="one of the runs: demo or real")) -> None:
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name, make, model in (("demo", demo, load_policy), ("real", real, model_folder)):
        if only in ("", name):
            with tempfile.TemporaryDirectory() as folder:
                found[name] = measured(make(Path(folder)), model(), Path(folder))
            FILE.write_text(json.dumps(found, indent=1) + "\n")
    page = PAGE.read_text()
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    PAGE.write_text(f"{before}{BEGIN}\n{table(found)}\n{END}{after}")


if __name__ == "__main__":
    typer.run(main)
