"""Corrections for stale rollouts: what they do in TRL's real trainer when every rollout is trained `lag` batches late.

The policy and the task of `rl-plugins demo`; GRPO's advantages, one optimizer step per batch, the same number of
trained rollouts in every arm. Rollouts are made by `rl_plugins.testing.delayed`: in batch b those are trained that the
policy of batch b - lag made, with their log-probs. Arms:

    GRPO                      the ratio is taken against the policy at the start of the step: nothing is corrected
    GRPO, ratio to sampler    the clipped ratio is taken against the policy that sampled
    CISPO, ratio to sampler   TRL's CISPO with that ratio
    truncated weight          decoupled_ppo, weights clamped at 2
    minpro                    its defaults
    decoupled_ppo             its defaults (mask above 5), proximal policy of the start of the step
    decoupled_ppo, loglinear  the proximal policy interpolated
    vcpo, rate only           learning rate by effective sample size, baseline of the group
    vcpo                      its defaults

    python examples/evidence/staleness.py --seeds 5 --out evidence-results

With lag 0 all arms but those of vcpo are one run. Every run is kept in `staleness-runs.json` as it ends, so that a
script that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from common import interval, named, parsed, record, save
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import line, name_lines, panels
from rl_plugins.lab.demo.policy import load_policy
from rl_plugins.lab.demo.settings import ON_CPU, REWARDS, write_data
from rl_plugins.testing.delayed import Delayed, installed

SAMPLER = {"delayed": {"sampled_as_old": True}}
ARMS: dict[str, tuple[list[str], dict[str, Any], dict[str, Any]]] = {  # methods, their parameters, options of TRL
    "GRPO": ([], {}, {}),
    "GRPO, ratio to sampler": ([], SAMPLER, {}),
    "CISPO, ratio to sampler": ([], SAMPLER, {"loss_type": "cispo", "epsilon_high": 5.0}),
    "truncated weight": (["decoupled_ppo"], {"decoupled_ppo": {"action": "clamp", "upper": 2.0}}, {}),
    "minpro": (["minpro"], {}, {}),
    "decoupled_ppo": (["decoupled_ppo"], {}, {}),
    "decoupled_ppo, loglinear": (["decoupled_ppo"], {"decoupled_ppo": {"proximal": "loglinear"}}, {}),
    "vcpo, rate only": (["vcpo"], {"vcpo": {"baseline": "group"}}, {}),
    "vcpo": (["vcpo"], {}, {}),
}


BASELINES = {
    "GRPO": "GRPO without correction",
    "GRPO, ratio to sampler": "GRPO with the ratio to the sampling policy",
    "CISPO, ratio to sampler": "CISPO with the ratio to the sampling policy",
}


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say; nothing of arms that were not run."""
    for method, own in (("decoupled_ppo", "GRPO"), ("minpro", "CISPO"), ("vcpo", "CISPO")):
        for baseline in ("GRPO", f"{own}, ratio to sampler"):
            cells = [r.get(f"{arm}, lag 16, rate 0.0003") for arm in (method, baseline)]
            if all(cells):
                value, other = (cell["right, last ten steps"] for cell in cells)
                claim = "right answers on rollouts 16 batches old, TRL"
                yield record(method, claim, "higher", value, other, baseline=BASELINES[baseline])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lags", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--rates", type=float, nargs="+", default=[3e-4], help="learning rates")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps that train")
    parser.add_argument("--rows", type=int, default=64, help="rollouts of a batch")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    options = parsed(parser, seeds=5)
    start = time.time()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "staleness-runs.json"
    runs: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    policy = load_policy()
    work = [
        (seed, rate, lag, arm)
        for seed in range(options.seeds)
        for rate in options.rates
        for lag in options.lags
        for arm in options.arms
        if lag or arm == "GRPO" or arm.startswith("vcpo")
    ]
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder) / "data")
        for number, (seed, rate, lag, arm) in enumerate(work, 1):
            key = f"{arm}|{lag}|{rate}|{options.steps}|{options.rows}|{seed}"
            if key not in runs:
                runs[key] = one_run(policy, data, Path(folder) / "out", seed, rate, lag, arm, options)
                file.write_text(json.dumps(runs))
            last = runs[key]["reward"][-10:]
            print(f"{number}/{len(work)} {key}: {np.mean(last):.3f}", flush=True)
    results = summarized(runs, options)
    save(
        options.out,
        "staleness",
        results,
        lambda: plot(runs, options),
        start,
        records=records(results),
        where="corrections-for-stale-rollouts-in-trls-real-trainer-5-seeds",
    )


def one_run(
    policy: Path, data: Path, out: Path, seed: int, rate: float, lag: int, arm: str, options: argparse.Namespace
) -> dict[str, Any]:
    """One arm: what was logged of every step that trains."""
    import torch
    from datasets import load_dataset
    from transformers.trainer_callback import PrinterCallback

    from rl_plugins.lab.demo import rewards
    from rl_plugins.trl import GRPOConfig, GRPOTrainer

    methods, params, own = ARMS[arm]
    given = {name: {**values} for name, values in params.items()}
    given["delayed"] = {"lag": lag, **given.get("delayed", {})}
    values: dict[str, Any] = {
        **{k: v for k, v in ON_CPU.items() if k != "dtype"},
        "model_init_kwargs": {"dtype": "float32"},
        "output_dir": str(out),
        "per_device_train_batch_size": options.rows,
        "num_generations": 8,
        "max_completion_length": 14,
        "max_steps": options.steps + lag,
        "learning_rate": rate,
        "lr_scheduler_type": "constant",
        "seed": seed,
        **own,
    }
    torch.set_num_threads(1)
    with installed(Delayed):
        trainer = GRPOTrainer(
            model=str(policy),
            reward_funcs=[getattr(rewards, name) for name in REWARDS],
            args=GRPOConfig(
                **values, reward_weights=[1.0, 0.0, 0.0], methods=["delayed", *methods], method_params=given
            ),
            train_dataset=load_dataset("json", data_files=str(data / "train.jsonl"), split="train"),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    logged = [h for h in trainer.state.log_history if "grad_norm" in h][lag:]
    names = {"reward": "rewards/exact/mean", "grad_norm": "grad_norm", "ess": "vcpo/ess_ratio", "loss": "loss"}
    return {short: [float(h[name]) for h in logged if name in h] for short, name in names.items()}


def of_arm(runs: dict[str, Any], arm: str, lag: int, rate: float, options: argparse.Namespace) -> list[Any]:
    """The runs of one arm, a seed each."""
    same = arm if lag or arm.startswith("vcpo") else "GRPO"
    return [runs[f"{same}|{lag}|{rate}|{options.steps}|{options.rows}|{s}"] for s in range(options.seeds)]


def summarized(runs: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Mean reward of new rollouts over the last ten steps, and largest gradient norm, with intervals over seeds."""
    results: dict[str, Any] = {"steps": options.steps, "rows": options.rows}
    for rate in options.rates:
        for lag in options.lags:
            for arm in options.arms:
                found = of_arm(runs, arm, lag, rate, options)
                results[f"{arm}, lag {lag}, rate {rate:g}"] = {
                    "right, last ten steps": interval([np.mean(r["reward"][-10:]) for r in found]),
                    "largest gradient norm": interval([max(r["grad_norm"]) for r in found]),
                    "effective sample size": interval([np.mean(r["ess"]) for r in found]) if found[0]["ess"] else None,
                }
    return results


def plot(runs: dict[str, Any], options: argparse.Namespace) -> Figure:
    """Reward curves, a panel per lag and learning rate."""
    figure, axes = panels(len(options.rates) * len(options.lags), sharey=True)
    settings = [(rate, lag) for rate in options.rates for lag in options.lags]
    for axis, (rate, lag) in zip(axes, settings, strict=True):
        for i, arm in enumerate(options.arms):
            curve = np.mean([run["reward"] for run in of_arm(runs, arm, lag, rate, options)], 0)
            axis.plot(np.convolve(curve, np.ones(5) / 5, "valid"), label=arm, **{**line(i), "lw": 1.2})
        named(axis, "optimizer step", "right answers of new rollouts (share)", f"Lag {lag}, learning rate {rate:g}")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
