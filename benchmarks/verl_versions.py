"""What `mu: version` of `dora_loss` costs in verl's `separate_async`: log-prob passes by older weights.

One run with rollouts up to two publications old. Of every step: passes by older weights, their time with the copies and
the restored weights, and verl's own time for old log-probs without it. Reported: the time of one further pass, and its
ratio to verl's pass in the same step, minimum and median over steps. The copies: parameters times 4 bytes, per version.

    python benchmarks/verl_versions.py --steps 20 --prompts 16
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from verl_overhead import finished, overridden

from rl_plugins.lab.demo import verl_data
from rl_plugins.lab.demo.policy import build_model, load_policy


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=20, help="global steps (default: %(default)s)")
    parser.add_argument("--prompts", type=int, default=16, help="prompts per step, 8 rollouts each")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".json"))
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        lines = verl_data.overrides(verl_data.write(folder / "data"), load_policy(), folder, steps=1, test_every=-1)
        changes = {
            "data.train_batch_size": arguments.prompts,
            "actor_rollout_ref.rollout.n": 8,
            "actor_rollout_ref.actor.ppo_mini_batch_size": arguments.prompts,
            "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": 32,
            "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": 32,
            "actor_rollout_ref.rollout.nnodes": 1,
            "actor_rollout_ref.rollout.n_gpus_per_node": 1,
            "actor_rollout_ref.rollout.checkpoint_engine.backend": "cpu_file",
            "trainer.v1.separate_async.parameter_sync_step": 1,
            "trainer.v1.separate_async.num_warmup_batches": 2,
            "trainer.v1.sampler.max_off_policy_threshold": 4,
            "trainer.v1.trainer_mode": "rl_plugins_separate_async",
            "trainer.total_training_steps": arguments.steps,
            "trainer.val_before_train": False,
            "+ray_kwargs.ray_init.num_gpus": 2,
            "ray_kwargs.ray_init.num_cpus": 16,
            "+rl_plugins.methods": "[dora_loss]",
            "+rl_plugins.method_params.dora_loss.mu": "version",
        }
        log = finished(folder, overridden(lines, changes))
        steps = [json.loads(line).get("data", {}) for line in log.read_text().splitlines()]
    found = [
        {
            "passes": x["rl_plugins/version_passes"],
            "seconds": x["rl_plugins/version_seconds"],
            "host": x["timing_s/old_log_prob"] - x["rl_plugins/version_seconds"],
        }
        for x in steps
        if x.get("rl_plugins/version_passes")
    ]
    each = [x["seconds"] / x["passes"] for x in found]
    ratio = [a / x["host"] for a, x in zip(each, found, strict=True)]
    copy = 4 * sum(p.numel() for p in build_model(0).parameters())
    result = {"steps": found, "pass": each, "ratio": ratio, "bytes per version": copy}
    arguments.out.write_text(json.dumps(result, indent=1))
    print(f"{len(found)} steps with passes by older weights, {sum(x['passes'] for x in found):.0f} passes")
    print(f"a pass: {min(each):.3f} / {statistics.median(each):.3f} s; ratio to verl's: {statistics.median(ratio):.2f}")
    print(f"a copy: {copy / 1e6:.2f} MB")


if __name__ == "__main__":
    main()
