"""The demo for TRL as files: policy, tasks, and a config that `rl-plugins trl grpo` runs as it is.

`python -m rl_plugins.lab.demo.trl_data FOLDER` writes them. examples/trl/run.yaml is the config for `laptop-run`.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

from rl_plugins.core.files import claim, write_text
from rl_plugins.lab.demo.settings import write_data

FOLDER = "laptop-run"
CONFIG = """\
# GRPO with a method on a laptop: the demo's policy (78,272 parameters) and tasks. No GPU, no download.
#
#   python -m rl_plugins.lab.demo.trl_data laptop-run                policy, tasks and this file, once
#   rl-plugins trl grpo --config laptop-run/run.yaml --dry-run   what would take effect; starts nothing
#   rl-plugins trl grpo --config laptop-run/run.yaml             the run
#   rl-plugins compare laptop-run/run.yaml gdpo --seeds 2        gdpo against plain GRPO (needs matplotlib)
#
# Needs the extra `trl`; from a clone: pip install ".[trl]"
methods: [gdpo]

model_name_or_path: laptop-run/policy
dataset_name: laptop-run/data
reward_funcs:
- rl_plugins.lab.demo.rewards.exact
- rl_plugins.lab.demo.rewards.digits
- rl_plugins.lab.demo.rewards.careful
reward_weights: [0.0, 1.0, 1.0]   # exact is logged and not trained
output_dir: laptop-run/out

# The batch: 128 rollouts, 4 per prompt; one optimizer step per batch.
per_device_train_batch_size: 128
num_generations: 4
max_completion_length: 14
max_steps: 80
learning_rate: 3.0e-4
lr_scheduler_type: constant_with_warmup
warmup_steps: 10
loss_type: dapo
beta: 0.0

eval_strategy: steps
eval_steps: 20
per_device_eval_batch_size: 320
num_generations_eval: 1
save_strategy: steps
save_steps: 20
logging_steps: 10

# A CPU
use_cpu: true
bf16: false
dtype: float32
gradient_checkpointing: false
dataloader_pin_memory: false
report_to: none
seed: 0
"""


def write(folder: Path) -> Path:
    """Writes `policy/`, `data/` and `run.yaml` below `folder` and returns the path of the config.

    A policy and tasks that are there already are replaced.
    """
    from rl_plugins.lab.demo.policy import load_policy

    write_data(folder / "data")
    shutil.copytree(load_policy(), folder / "policy", dirs_exist_ok=True)
    config = folder / "run.yaml"
    write_text(config, CONFIG.replace(FOLDER, folder.as_posix()))
    return config


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m rl_plugins.lab.demo.trl_data",
        description="Write the demo's policy, its tasks and a config of `rl-plugins trl grpo` that runs on a CPU.",
    )
    parser.add_argument("folder", type=Path, help="folder for policy, tasks and config")
    folder = parser.parse_args().folder
    claim(folder, "demo")
    config = write(folder)
    print(f"Written: {config}. Run it: rl-plugins trl grpo --config {config}")


if __name__ == "__main__":
    main()
