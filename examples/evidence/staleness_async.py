"""Corrections for stale rollouts in TRL's asynchronous trainer: rollouts are `lag` optimizer steps old.

The policy and the task of `rl-plugins demo`, TRL's own advantages and clip, the same number of rollouts per optimizer
step in every arm. `GenerateWorker` makes them with weights that are exactly `lag` steps old (0, 1, .. in the first
`lag` steps). The trainer's own ratio is taken against the policy that sampled. Arms:

    no correction             the ratio is taken against the policy at the start of the step, so it is 1
    TRL's clip                the trainer as it is, without methods
    CISPO                     its weight, against the policy that sampled, at most 5
    minpro                    its defaults
    decoupled_ppo             its defaults (mask above 5); the policy of the start of the step is the live one
    decoupled_ppo, loglinear  the proximal policy interpolated
    vcpo, rate only           learning rate by effective sample size, baseline of the group
    vcpo                      its defaults

    python examples/evidence/staleness_async.py --seeds 5 --out evidence-results

Lag 0 does not exist there: one micro-batch is read ahead. Every run is kept in `staleness_async-runs.json` as it ends,
so that a script that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import interval, named, save
from matplotlib.figure import Figure

from rl_plugins.core.losses import weighted_logprob
from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import Terms
from rl_plugins.lab.compare.figures import line, name_lines, panels
from rl_plugins.lab.demo.policy import load_policy
from rl_plugins.lab.demo.settings import write_data
from rl_plugins.testing.delayed import installed


class Uncorrected(Method):
    """REINFORCE with the gradient of a ratio of 1: the age of a rollout is not seen."""

    name = "uncorrected"
    fidelity = "reconstruction"
    use_when = "Rollouts are of the policy that is trained."

    def policy_loss(self, terms: Terms) -> torch.Tensor:
        return weighted_logprob(terms.logprobs, torch.ones_like(terms.logprobs), terms.advantages)


class Cispo(Method):
    """The weight of MiniMax-M1 (arXiv 2506.13585) against the policy that sampled, at most 5."""

    name = "cispo"
    fidelity = "reconstruction"
    use_when = "Rollouts are stale."

    def policy_loss(self, terms: Terms) -> torch.Tensor:
        ratio = (terms.logprobs.detach() - terms.old_logprobs).clamp(max=20).exp()
        return weighted_logprob(terms.logprobs, ratio.clamp(max=5), terms.advantages)


ARMS: dict[str, tuple[list[str], dict[str, Any]]] = {  # methods, their parameters
    "no correction": (["uncorrected"], {}),
    "TRL's clip": ([], {}),
    "CISPO": (["cispo"], {}),
    "minpro": (["minpro"], {}),
    "decoupled_ppo": (["decoupled_ppo"], {}),
    "decoupled_ppo, loglinear": (["decoupled_ppo"], {"decoupled_ppo": {"proximal": "loglinear"}}),
    "vcpo, rate only": (["vcpo"], {"vcpo": {"baseline": "group"}}),
    "vcpo": (["vcpo"], {}),
}


FINAL = 512  # rollouts of the weights a run ended with, on prompts that come next


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--lags", type=int, nargs="+", default=[1, 4, 16])
    parser.add_argument("--rate", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--steps", type=int, default=80, help="optimizer steps")
    parser.add_argument("--rows", type=int, default=64, help="rollouts of an optimizer step")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    parser.add_argument("--out", type=Path, default=Path("evidence-results"))
    options = parser.parse_args()
    start = time.time()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "staleness_async-runs.json"
    runs: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    policy = load_policy()
    work = [(seed, lag, arm) for seed in range(options.seeds) for lag in options.lags for arm in options.arms]
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder) / "data")
        for number, (seed, lag, arm) in enumerate(work, 1):
            key = key_of(arm, lag, seed, options)
            if key not in runs:
                runs[key] = one_run(policy, data, Path(folder) / "out", seed, lag, arm, options)
                file.write_text(json.dumps(runs))
            print(f"{number}/{len(work)} {key}: {runs[key]['final']:.3f}", flush=True)
    save(options.out, "staleness_async", summarized(runs, options), lambda: plot(runs, options), start)


def key_of(arm: str, lag: int, seed: int, options: argparse.Namespace) -> str:
    return f"{arm}|{lag}|{options.rate}|{options.steps}|{options.rows}|{seed}"


def one_run(
    policy: Path, data: Path, out: Path, seed: int, lag: int, arm: str, options: argparse.Namespace
) -> dict[str, Any]:
    """One arm: what was logged of every optimizer step."""
    from datasets import load_dataset
    from transformers.trainer_callback import PrinterCallback

    from rl_plugins.lab.demo import rewards
    from rl_plugins.trl.asynchronous import AsyncGRPOConfig, AsyncGRPOTrainer, GenerateWorker, cpu

    cpu.activate()
    torch.set_num_threads(1)
    methods, params = ARMS[arm]
    rows = load_dataset("json", data_files=str(data / "train.jsonl"), split="train").shuffle(seed=seed)
    with installed(Uncorrected, Cispo):
        args = AsyncGRPOConfig(
            output_dir=str(out),
            per_device_train_batch_size=options.rows,
            num_generations=8,
            max_completion_length=14,
            max_steps=options.steps,
            learning_rate=options.rate,
            max_staleness=lag,
            token_budget=0,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
            methods=methods,
            method_params=params,
        )
        worker = GenerateWorker(str(policy), rewards.exact, rows, args, lag)
        trainer = AsyncGRPOTrainer(
            model=str(policy),
            reward_funcs=rewards.exact,
            args=args,
            train_dataset=rows,
            rollout_worker=worker,
            weight_transfer=worker,
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    worker.lag = -1  # from now on by the newest weights
    waiting = worker.qsize()
    samples = [worker.get() for _ in range(waiting + FINAL)][waiting:]
    logged = [h for h in trainer.state.log_history if "grad_norm" in h]
    names = {"reward": "rewards/exact", "grad_norm": "grad_norm", "ratio": "ratio", "ess": "vcpo/ess_ratio"}
    series = {short: [float(h[name]) for h in logged if name in h] for short, name in names.items()}
    return {**series, "final": float(np.mean([s.metrics["rewards/exact"] for s in samples]))}


def of_arm(runs: dict[str, Any], arm: str, lag: int, options: argparse.Namespace) -> list[Any]:
    """The runs of one arm, a seed each."""
    return [runs[key_of(arm, lag, seed, options)] for seed in range(options.seeds)]


def summarized(runs: dict[str, Any], options: argparse.Namespace) -> dict[str, Any]:
    """Share of right answers of the last weights, and largest gradient norm, with intervals over seeds."""
    results: dict[str, Any] = {"steps": options.steps, "rows": options.rows, "rate": options.rate}
    for lag in options.lags:
        for arm in options.arms:
            found = of_arm(runs, arm, lag, options)
            results[f"{arm}, lag {lag}"] = {
                "right, last weights": interval([r["final"] for r in found]),
                "largest gradient norm": interval([max(r["grad_norm"]) for r in found]),
            }
    return results


def plot(runs: dict[str, Any], options: argparse.Namespace) -> Figure:
    """Reward curves, a panel per lag."""
    figure, axes = panels(len(options.lags), sharey=True)
    for axis, lag in zip(axes, options.lags, strict=True):
        for i, arm in enumerate(options.arms):
            curve = np.mean([run["reward"] for run in of_arm(runs, arm, lag, options)], 0)
            axis.plot(np.convolve(curve, np.ones(5) / 5, "valid"), label=arm, **{**line(i), "lw": 1.2})
        named(axis, "optimizer step", "right answers of rollouts trained (share)", f"Lag {lag}")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
