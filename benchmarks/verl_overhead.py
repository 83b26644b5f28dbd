"""Seconds per training step of the verl adapter against verl's own `sync` trainer, in one run.

The trainer of this file is ours with another stack every step: arms take turns, so that a machine whose speed drifts
treats them alike. With an empty stack every override hands on to verl and verl's own loss is set, so that arm is verl's
`sync`; both look for rollouts every 0.2 s (verl's 2.0 s would hide everything). Reported: minimum and median over
repetitions of the whole step and of its parts, and the ratio to stock in the same round.

    python benchmarks/verl_overhead.py --repeat 9 --prompts 32
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ARMS = ["", "gdpo", "vade", "minpro", "mc_grpo", "vade+mc_grpo"]
PARTS = ("gen", "old_log_prob", "adv", "update_actor")
MODULE = Path(__file__).stem


def register(module: Any) -> None:
    """In the processes of the run: the trainer that takes turns."""
    import dataclasses
    import functools

    from verl.trainer.ppo.v1 import register_trainer
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    from rl_plugins.verl import loss, trainer

    class Turns(trainer.MethodsSync):  # type: ignore[misc, valid-type]
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self._arms = []
            for arm in ARMS:
                names = tuple(n for n in arm.split("+") if n)
                params = {k: v for k, v in self.settings.method_params.items() if k in names}
                settings = dataclasses.replace(self.settings, methods=names, method_params=params)
                self._arms.append((settings, settings.stack()))

        def on_init_end(self) -> None:
            for _, stack in self._arms:
                stack.start(self.known().run())
            super().on_init_end()

        def on_step_begin(self) -> None:
            self.settings, self.methods = self._arms[(self.global_steps - 1) % len(ARMS)]
            actor = omega_conf_to_dataclass(self.config.actor_rollout_ref.actor)
            mine = loss.MethodsLoss(actor, self.settings, self.config)
            self.actor_rollout_wg.set_loss_fn(mine if self.methods else functools.partial(ppo_loss, config=actor))
            super().on_step_begin()

    register_trainer("turns")(Turns)


if __name__ != "__main__":
    from rl_plugins.verl.imports import after_import

    after_import("rl_plugins.verl.trainer", register)


def main() -> None:
    from rl_plugins.lab.demo import verl_data
    from rl_plugins.lab.demo.policy import load_policy

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeat", type=int, default=9, help="rounds of all arms that count (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=32, help="prompts per step, 8 rollouts each")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        steps = read(run(Path(folder), arguments, verl_data, load_policy()), warm=len(ARMS))
    result = {"prompts": arguments.prompts, "repeat": arguments.repeat, "arms": summary(steps)}
    arguments.out.write_text(json.dumps(result, indent=1))
    for arm, entry in result["arms"].items():
        parts = "  ".join(f"{p} {entry['parts'][p]['median']:.3f}" for p in PARTS)
        print(
            f"{arm or 'stock':14s} step {entry['min']:.3f} / {entry['median']:.3f} s  ratio {entry['ratio']:.2f}  "
            f"{parts}"
        )


def run(folder: Path, arguments: argparse.Namespace, verl_data: Any, policy: Path) -> Path:
    """One run of all arms; returns verl's log."""
    rows = arguments.prompts * 8
    lines = verl_data.overrides(verl_data.write(folder / "data"), policy, folder, steps=1, test_every=-1)
    changes = {
        "data.train_batch_size": arguments.prompts,
        "actor_rollout_ref.rollout.n": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": arguments.prompts,
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": rows,
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 32,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 32,
        "trainer.total_training_steps": len(ARMS) * (arguments.repeat + 1),
        "trainer.val_before_train": False,
        "trainer.v1.trainer_mode": "turns",
        "+rl_plugins.methods": "[mc_grpo]",
        "+rl_plugins.method_params.mc_grpo.advantage_clip": 3,
        "+rl_plugins.rewards.exact": 1,
        "+rl_plugins.rewards.digits": 0.5,
    }
    return finished(folder, overridden(lines, changes), VERL_USE_EXTERNAL_MODULES=MODULE)


def overridden(lines: list[str], changes: dict[str, Any]) -> list[str]:
    """The command line of a run with these options instead."""
    named = {line.split("=")[0]: line for line in lines} | {k: f"{k}={v}" for k, v in changes.items()}
    return list(named.values())


def finished(folder: Path, overrides: list[str], **environment: str) -> Path:
    """Runs verl to its end and returns its log."""
    environment = {
        **os.environ,
        **environment,
        "VERL_PLATFORM": "cpu",
        "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), str(Path(__file__).parents[1])]),
        "VERL_FILE_LOGGER_ROOT": str(folder),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *overrides]
    done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout[-4000:]}\n{done.stderr[-2000:]}")
    return next(folder.rglob("*.jsonl"))


def read(log: Path, warm: int) -> list[dict[str, float]]:
    """Seconds of every step and its parts, without the first round."""
    lines = [json.loads(line) for line in log.read_text().splitlines()]
    lines = [x["data"] for x in lines if "timing_s/step" in x.get("data", {})]
    return [{p: x[f"timing_s/{p}"] for p in ("step", *PARTS)} for x in lines][warm:]


def summary(steps: list[dict[str, float]]) -> dict[str, Any]:
    stock = [s["step"] for s in steps[:: len(ARMS)]]
    arms: dict[str, Any] = {}
    for i, arm in enumerate(ARMS):
        mine = steps[i :: len(ARMS)]
        whole = [s["step"] for s in mine]
        arms[arm] = {
            "min": min(whole),
            "median": statistics.median(whole),
            "ratio": statistics.median(a / b for a, b in zip(whole, stock, strict=True)),
            "parts": {
                p: {"min": min(s[p] for s in mine), "median": statistics.median(s[p] for s in mine)} for p in PARTS
            },
        }
    return arms


if __name__ == "__main__":
    main()
