"""Which sampler, budget or curriculum leaves most to learn from: TRL's real trainer, a heavy-tailed mix of prompts.

The policy and the tasks of `rl-plugins demo`, binary reward, but another mix: a quarter of the prompts has two digits,
which the policy soon sorts without a mistake, and 40 % have ten or twelve, of which it solves 10 and 3 % at first. All
arms generate the same number of rollouts in all, up to 128 a batch (8 per prompt where the arm does not decide that);
an arm that needs fewer has more batches. Measured:

    signal     share of the generated rollouts that are in a group with right and wrong ones
    held out   right answers on 200 prompts of the same mix that are never trained, 8 samples each, after the last step
    hard       the same, of the prompts with ten and twelve digits

    python examples/evidence/prompts.py --seeds 5 --out evidence-results

Every run is kept in `prompts-runs.json` as it ends, so that a script that was interrupted goes on.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import interval, named, parsed, record, save
from matplotlib.figure import Figure

from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import Rollouts, Tokens
from rl_plugins.lab.compare.figures import color, line, name_lines, panels
from rl_plugins.lab.demo import tasks
from rl_plugins.lab.demo.policy import load_policy
from rl_plugins.lab.demo.settings import ON_CPU
from rl_plugins.testing.delayed import installed

MIX = {1: 0.25, 2: 0.15, 3: 0.1, 4: 0.1, 5: 0.2, 6: 0.2}  # level (half the digits) -> share of the prompts
HARD, TRAINED, HELD_OUT, SAMPLES = (5, 6), 120, 200, 8
PROMPTS, GROUP = 16, 8
ARMS: dict[str, dict[str, dict[str, Any]]] = {  # methods and their parameters
    "GRPO": {},
    "vade": {"vade": {}},
    "v0": {"v0": {"prior": "running_mean"}},
    "gdro_prompt": {"gdro_prompt": {}},
    "gdro_rollout": {"gdro_rollout": {}},
    "dars": {"dars": {"n_first": 4}},
    "xrpo_allocate": {"xrpo_allocate": {}},
    "brorl": {"brorl": {"ramp": [[0, 16]]}},
    "drive": {"drive": {"sizes": [1.0, 0.4, 0.3, 0.15], "batches": [20, 20, 20]}},
    "linear_ts": {"linear_ts": {"column": "level", "draws": 16}},
}


class Signal(Method):
    """Counts rollouts in groups with right and wrong ones. Changes nothing."""

    name = "signal"
    fidelity = "reconstruction"

    def observe(self, rollouts: Rollouts, tokens: Tokens, stats: Mapping[str, float]) -> None:
        groups, reward = rollouts.groups, rollouts.reward
        mixed = groups.max(reward) > groups.min(reward)
        self.log("rows", len(rollouts))
        self.log("share", groups.rows(mixed).double().mean())
        self.log("groups", mixed.double().mean())


def rows(count: int, seed: int, split: str) -> list[dict[str, Any]]:
    """Prompts of the mix, all different."""
    rng, found = random.Random(f"{seed}/{split}"), {}
    for level, share in MIX.items():
        wanted = len(found) + round(count * share)
        while len(found) < wanted:
            prompt = tasks.random_prompt(rng, level, split)
            found[prompt] = level
    each = [
        {"prompt": [{"role": "user", "content": p}], "answer": tasks.solve(p), "level": level}
        for p, level in found.items()
    ]
    rng.shuffle(each)
    return each


SIGNAL = ("signal", "share of rollouts in groups with a signal, TRL")
RIGHT = ("held out", "right answers on held-out prompts, TRL, same number of rollouts")
HARD_ONES = ("hard", "right answers on hard held-out prompts, TRL, same number of rollouts")
TOLD = {  # arm -> what its card says
    **dict.fromkeys(("brorl", "dars", "gdro_rollout", "linear_ts", "v0", "vade", "xrpo_allocate"), (SIGNAL, RIGHT)),
    **dict.fromkeys(("drive", "gdro_prompt"), (RIGHT, HARD_ONES)),
}
SETTING = {"brorl": ", 16 per prompt", "linear_ts": ", 16 draws"}


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    for arm in sorted(set(TOLD) & set(r)) if "GRPO" in r else ():
        for measure, claim in TOLD[arm]:
            budget = "rollouts" if "same number" in claim else ""
            claim += SETTING.get(arm, "") if measure == "signal" else ""
            yield record(arm, claim, "higher", r[arm][measure], r["GRPO"][measure], baseline="GRPO", budget=budget)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="full batches, an optimizer step each")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS), metavar="ARM")
    options = parsed(parser, seeds=5)
    start = time.time()
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "prompts-runs.json"
    runs: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    work = [(seed, arm) for seed in range(options.seeds) for arm in options.arms]
    for number, (seed, arm) in enumerate(work, 1):
        key = f"{arm}|{options.steps}|{seed}"
        if key not in runs:
            with tempfile.TemporaryDirectory() as folder:
                runs[key] = one_run(Path(folder), seed, arm, options.steps)
            file.write_text(json.dumps(runs))
        found = runs[key]
        print(f"{number}/{len(work)} {key}: signal {np.mean(found['share']):.3f}, {found['held_out']:.3f}", flush=True)
    of = {arm: [runs[f"{arm}|{options.steps}|{seed}"] for seed in range(options.seeds)] for arm in options.arms}
    results: dict[str, Any] = {"steps": options.steps}
    for arm, found in of.items():
        results[arm] = {
            "signal": interval([np.mean(r["share"]) for r in found]),
            "groups with signal": interval([np.mean(r["groups"]) for r in found]),
            "batches": interval([len(r["rows"]) for r in found]),
            "generated": interval([sum(r["rows"]) for r in found]),
            "held out": interval([r["held_out"] for r in found]),
            "hard": interval([r["hard"] for r in found]),
        }
    where = "prompts-and-rollouts-in-trls-real-trainer-5-seeds"
    save(options.out, "prompts", results, lambda: plot(of, results), start, records(results), where)
    for arm in options.arms:
        columns = ("signal", "groups with signal", "batches", "generated", "held out", "hard")
        print(f"{arm:14}", *(f"{results[arm][c]['mean']:8.3f} ± {results[arm][c]['ci95']:.3f}" for c in columns))


def one_run(folder: Path, seed: int, arm: str, steps: int) -> dict[str, Any]:
    """One arm: what was logged of every batch, and right answers at the end."""
    from datasets import Dataset
    from transformers.trainer_callback import PrinterCallback, TrainerCallback

    from rl_plugins.lab.demo.rewards import exact
    from rl_plugins.trl import GRPOConfig, GRPOTrainer

    class Budget(TrainerCallback):
        """Ends the run when it has generated what `steps` full batches come to; some arms leave part of a batch."""

        left = steps * PROMPTS * GROUP

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
            self.left -= (logs or {}).get("signal/rows", 0)
            control.should_training_stop = self.left <= 0

    params = ARMS[arm]
    torch.set_num_threads(1)
    with installed(Signal):
        args = GRPOConfig(
            **{k: v for k, v in ON_CPU.items() if k != "dtype"},
            model_init_kwargs={"dtype": "float32"},
            output_dir=str(folder),
            per_device_train_batch_size=PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=14,
            max_steps=2 * steps,
            learning_rate=3e-4,
            seed=seed,
            methods=[*params, "signal"],
            method_params={name: values for name, values in params.items() if values},
        )
        trainer = GRPOTrainer(
            model=str(load_policy()),
            reward_funcs=exact,
            args=args,
            train_dataset=Dataset.from_list(rows(TRAINED, seed, "train")),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.add_callback(Budget())
        trainer.train()
    logged = [h for h in trainer.state.log_history if "signal/share" in h]
    right = evaluate(trainer.model, trainer.processing_class, seed)
    level = np.array([row["level"] for row in rows(HELD_OUT, 0, "held_out")])
    return {
        **{name: [float(h[f"signal/{name}"]) for h in logged] for name in ("rows", "share", "groups")},
        "held_out": float(right.mean()),
        "hard": float(right[np.isin(level, HARD)].mean()),
    }


def evaluate(model: Any, tokenizer: Any, seed: int) -> np.ndarray:
    """(prompts,) share of right answers of the held-out prompts, which are the same for all seeds and arms."""
    test = rows(HELD_OUT, 0, "held_out")
    texts = [tokenizer.apply_chat_template(r["prompt"], add_generation_prompt=True, tokenize=False) for r in test]
    inputs = tokenizer(texts, return_tensors="pt", padding=True, padding_side="left", add_special_tokens=False)
    torch.manual_seed(seed)
    with torch.no_grad():
        made = model.generate(**inputs, do_sample=True, num_return_sequences=SAMPLES, max_new_tokens=14)
    answers = tokenizer.batch_decode(made[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    right = [text[1:] == test[i // SAMPLES]["answer"] for i, text in enumerate(answers)]
    return np.array(right, dtype=float).reshape(HELD_OUT, SAMPLES).mean(1)


def plot(of: dict[str, list[Any]], results: dict[str, Any]) -> Figure:
    figure, (share, held_out) = panels(2, 3.2)
    for i, (arm, found) in enumerate(of.items()):
        curve = np.mean([r["share"][: min(len(r["share"]) for r in found)] for r in found], 0)
        share.plot(np.convolve(curve, np.ones(8) / 8, "valid"), label="_", **{**line(i), "lw": 1.2})
        both = results[arm]["signal"], results[arm]["held out"]
        held_out.errorbar(
            both[0]["mean"], both[1]["mean"], both[1]["ci95"], both[0]["ci95"], fmt="o", label=arm, color=color(i)
        )
    named(share, "generation batch", "share of rollouts in groups with signal")
    named(held_out, "share of rollouts in groups with signal, mean of the run", "right answers, held out (share)")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
