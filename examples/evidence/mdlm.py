"""EOSER, ASS and CJ-GRPO (arXiv 2509.23924): how many passes, which tokens first, and which log-probs to train on?

Real TRL: `MaskedGRPOTrainer` on the demo's bidirectional policy of 247,368 parameters; each seed has a warm start of
its own. Answers have 14 tokens, temperature 1.

1. Right answers on 320 held-out prompts without training, by passes of the model, with the confidence of end tokens
   multiplied by a factor that begins at 1 (off), 0.4 and 0.01; and with ASS (1, 2, 11 tokens). The same at temperature
   0, with 3 and 14 passes and ASS. The share of answers with too few digits.
2. 256 sampled answers. Each token has two log-probs: from one pass over masks (as in diffu-GRPO, 15 % of the prompt
   hidden), and in the state in which it was unmasked. Measured: their difference, and the cosine of the two policy
   gradients on the same answers and advantages.
3. 36 optimizer steps of 128 rollouts, 3 passes per answer, every arm on the same rows: right answers on 320 held-out
   prompts, decoded as in training.

The learning rate is that of the demo; 3e-4 was chosen from 3e-4 and 1e-3 on seed 100.

    python examples/evidence/mdlm.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import across, arguments, band, interval, named, points, record, save, summary
from datasets import Dataset
from matplotlib.figure import Figure
from torch import Tensor
from transformers.trainer_callback import PrinterCallback
from transformers.utils import logging as transformers_logging

from rl_plugins.kit.masked import Decoded, Decoding, decode, trajectory_logprobs
from rl_plugins.lab.compare.figures import panels
from rl_plugins.lab.demo import masked, masked_policy, rewards, settings, tasks
from rl_plugins.lab.demo.policy import MAX_COMPLETION_LENGTH as LENGTH
from rl_plugins.trl.masked import MaskedGRPOConfig, MaskedGRPOTrainer

PASSES = (1, 2, 3, 4, 7, 14)
FACTORS = {"off": 1.0, "0.4": 0.4, "0.01": 0.01}
HELD_OUT, SAMPLED, GROUP, STEPS, EVERY, HIDDEN = 320, 256, 4, 36, 12, 0.15
DECODINGS = {
    "3 passes": Decoding(LENGTH, steps=3),
    "7 passes": Decoding(LENGTH, steps=7),
    "ASS": Decoding(LENGTH, schedule="ascending"),
}
TOKENS = {"cj_grpo": {"step_weight": "tokens"}}
ARMS: dict[str, tuple[list[str], dict[str, Any]]] = {
    "one step": ([], {}),
    "cj_grpo": (["cj_grpo"], {}),
    "eoser, one step": (["eoser"], {}),
    "eoser, cj_grpo": (["eoser", "cj_grpo"], {}),
    "mdlm": (["mdlm"], {}),
    "mdlm, tokens alike": (["mdlm"], TOKENS),
}


class Policy:
    """A warm-started policy, and prompts with their answers."""

    def __init__(self, seed: int) -> None:
        self.tokenizer = masked_policy.build_tokenizer()
        self.model = masked_policy.build_model(seed)
        warm = dataclasses.replace(masked_policy.MASKED_WARM_START, seed=seed)
        masked_policy.warm_start(self.model, self.tokenizer, warm)
        self.mask_id, self.end_id = int(self.tokenizer.mask_token_id), int(self.tokenizer.eos_token_id)

    def prompts(self, rows: list[dict[str, Any]]) -> tuple[Tensor, Any]:
        """(rows, prompt) token ids, and what gives logits of prompts with answers."""
        texts = [f"<user>{row['prompt'][0]['content']}<asst>" for row in rows]
        asked = self.tokenizer(texts, return_tensors="pt", padding=True, return_token_type_ids=False)
        seen = torch.nn.functional.pad(asked["attention_mask"], (0, LENGTH), value=1)
        places = (seen.cumsum(1) - 1).clamp(min=0)

        def logits(ids: Tensor) -> Tensor:
            found: Tensor = self.model(input_ids=ids, attention_mask=seen, position_ids=places).logits
            return found

        return asked["input_ids"], logits

    def decoded(self, rows: list[dict[str, Any]], how: Decoding, seed: int) -> Decoded:
        ids, logits = self.prompts(rows)
        return decode(logits, ids, how, self.mask_id, self.end_id, torch.Generator().manual_seed(seed))

    def right(self, rows: list[dict[str, Any]], answer: Tensor) -> Tensor:
        texts = self.tokenizer.batch_decode(answer, skip_special_tokens=True)
        return torch.tensor(rewards.exact(None, texts, answer=[row["answer"] for row in rows]))

    def too_short(self, rows: list[dict[str, Any]], answer: Tensor) -> Tensor:
        texts = self.tokenizer.batch_decode(answer, skip_special_tokens=True)
        return torch.tensor([float(len(t) <= len(row["answer"])) for t, row in zip(texts, rows, strict=True)])


def accuracy(policy: Policy, seed: int) -> dict[str, float]:
    """Share of right answers, and of those with too few digits, by way of decoding."""
    rows = tasks.build_rows(HELD_OUT, seed=seed, split="held_out")
    found = {}
    for temperature, passes in ((1.0, PASSES), (0.0, (3, 14))):
        for name, factor in FACTORS.items():
            more = {"temperature": temperature, "end_start": factor}
            ways = {str(n): Decoding(LENGTH, steps=n, **more) for n in passes}
            ways["ASS"] = Decoding(LENGTH, schedule="ascending", **more)
            for way, how in ways.items():
                answer = policy.decoded(rows, how, seed).answer
                found[f"{temperature:g}/{name}/{way}"] = float(policy.right(rows, answer).mean())
                if temperature:
                    found[f"short/{name}/{way}"] = float(policy.too_short(rows, answer).mean())
    return found


def bias(policy: Policy, seed: int) -> dict[str, float]:
    """One-step log-probs against those of the trajectory, and the policy gradients that follow from both."""
    rows = [row for row in tasks.build_rows(SAMPLED // GROUP, seed=seed) for _ in range(GROUP)]
    ids, logits = policy.prompts(rows)
    hidden = torch.rand(ids.shape, generator=torch.Generator().manual_seed(seed)) < HIDDEN
    found = {}
    for name, how in DECODINGS.items():
        answer, at = policy.decoded(rows, how, seed)
        reward = policy.right(rows, answer).view(-1, GROUP)
        advantages = (reward - reward.mean(1, keepdim=True)).flatten()
        given: list[Tensor] = []
        gradients: list[Tensor] = []
        for prompt, when, steps in (
            (ids.masked_fill(hidden, policy.mask_id), at * 0, 1),
            (ids, at, how.number_of_steps),
        ):
            lp, _ = trajectory_logprobs(
                logits, prompt, answer, when, steps, policy.mask_id, recompute=True, without_mask=True
            )
            policy.model.zero_grad()
            (advantages[:, None] * lp).mean().backward()
            given.append(lp.detach())
            gradients.append(torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None]))
        apart = (given[0] - given[1]).abs()
        found[f"{name}/mean"] = float(apart.mean())
        found[f"{name}/above 1"] = float((apart > 1).float().mean())
        found[f"{name}/cosine"] = float(torch.cosine_similarity(gradients[0], gradients[1], dim=0))
    policy.model.zero_grad()
    return found


def train(policy: Policy, arm: str, seed: int) -> list[float]:
    """Right answers on held-out prompts, before training and after every 12 steps."""
    methods, params = ARMS[arm]
    with tempfile.TemporaryDirectory() as folder:
        values = masked.config(Path(folder), Path(folder), methods, long=False)
        for name in ("model_name_or_path", "dataset_name", "dtype", "reward_funcs"):
            del values[name]
        values |= {"max_steps": STEPS, "eval_steps": EVERY, "per_device_eval_batch_size": HELD_OUT, "seed": seed}
        args = MaskedGRPOConfig(output_dir=folder, methods=methods, method_params=params, **values)
        trainer = MaskedGRPOTrainer(
            model=copy.deepcopy(policy.model),
            processing_class=policy.tokenizer,
            reward_funcs=[getattr(rewards, name) for name in settings.REWARDS],
            args=args,
            train_dataset=Dataset.from_list(tasks.build_rows(settings.TRAIN_PROMPTS, seed=seed)),
            eval_dataset=Dataset.from_list(tasks.build_rows(HELD_OUT, seed=seed, split="held_out")),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    name = "eval_rewards/exact/mean"
    return [entry[name] for entry in trainer.state.log_history if name in entry]


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "ass",
        "right answers, both with eoser (toy, no training)",
        "higher",
        difference=r["ASS minus 3 passes"]["1/0.01"],
        baseline="3 uniform passes",
    )
    yield record(
        "ass",
        "right answers, both without eoser (toy, no training)",
        "higher",
        difference=r["ASS minus 3 passes"]["1/off"],
        baseline="3 uniform passes",
    )
    yield record(
        "cj_grpo",
        "right answers after 36 steps, with eoser (toy)",
        "higher",
        difference=r["at the end"]["eoser, cj_grpo minus eoser, one step"],
        baseline="one-step log-probs",
    )
    yield record(
        "cj_grpo",
        "right answers after 36 steps, without eoser (toy)",
        "higher",
        difference=r["at the end"]["cj_grpo minus one step"],
        baseline="one-step log-probs",
    )
    yield record(
        "eoser",
        "right answers in 7 passes at temperature 1 (toy, no training)",
        "higher",
        difference=r["factor minus off"]["1/0.01/7"],
        baseline="those without it",
    )
    yield record(
        "eoser",
        "right answers in 14 passes at temperature 0 (toy, no training)",
        "higher",
        difference=r["factor minus off"]["0/0.01/14"],
        baseline="those without it",
    )
    yield record(
        "mdlm",
        "right answers after 36 steps, 3 passes each (toy)",
        "higher",
        difference=r["at the end"]["mdlm minus one step"],
        baseline="one-step log-probs",
    )
    yield record(
        "mdlm",
        "right answers after 36 steps (toy)",
        "higher",
        difference=r["at the end"]["mdlm minus eoser, cj_grpo"],
        baseline="eoser and cj_grpo in 3 uniform passes",
    )


def main() -> None:
    args, start = arguments(__doc__, seeds=5), time.time()
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    decoded: list[dict[str, float]] = []
    biased: list[dict[str, float]] = []
    curves: dict[str, list[list[float]]] = {arm: [] for arm in ARMS}
    for seed in range(args.seeds):
        policy = Policy(seed)
        decoded.append(accuracy(policy, seed))
        biased.append(bias(policy, seed))
        for arm in ARMS:
            curves[arm].append(train(policy, arm, seed))
            print(f"seed {seed} {arm:20s} {curves[arm][-1]}", flush=True)
    results = results_of(decoded, biased, curves)
    for name, cells in results.items():
        if name not in ("curves", "gains"):
            print(name, *(f"\n  {k:26s} {v['mean']:.3f} +- {v['ci95']:.3f}" for k, v in cells.items()))
    content = {"method": "mdlm", "settings": {"steps": STEPS, "seeds": args.seeds}, "results": results}
    save(args.out, "mdlm", content, lambda: plot(results), start, records=records(results), where="mdlm-5-seeds")


def results_of(
    decoded: list[dict[str, float]], biased: list[dict[str, float]], curves: dict[str, list[list[float]]]
) -> dict[str, Any]:
    """Means with intervals; what is called a difference is paired by seed."""
    ends = {arm: np.array([c[-1] for c in runs]) for arm, runs in curves.items()}
    starts = {arm: np.array([c[0] for c in runs]) for arm, runs in curves.items()}

    def minus(one: str, other: str) -> dict[str, Any]:
        return interval([d[one] - d[other] for d in decoded])

    ways = [k.split("/") for k in decoded[0] if "/off/" in k and not k.startswith("short")]
    return {
        "right answers": {k: interval([d[k] for d in decoded]) for k in decoded[0]},
        "factor minus off": {
            f"{t}/{factor}/{way}": minus(f"{t}/{factor}/{way}", f"{t}/off/{way}")
            for t, _, way in ways
            for factor in ("0.4", "0.01")
        },
        "ASS minus 3 passes": {f"{t}/{f}": minus(f"{t}/{f}/ASS", f"{t}/{f}/3") for t in ("1", "0") for f in FACTORS},
        "0.4 minus 0.01": {way: minus(f"1/0.4/{way}", f"1/0.01/{way}") for t, _, way in ways if t == "1"},
        "7 passes, 0.01, minus 14, off": {"1": minus("1/0.01/7", "1/off/14")},
        "bias": {k: interval([b[k] for b in biased]) for k in biased[0]},
        "curves": {arm: [summary(column) for column in np.array(runs).T] for arm, runs in curves.items()},
        "gains": {arm: [summary(column - starts[arm]) for column in np.array(runs).T] for arm, runs in curves.items()},
        "end": {arm: interval(values) for arm, values in ends.items()},
        "gain": {arm: interval(ends[arm] - starts[arm]) for arm in ends},
        "at the end": {
            f"{a} minus {b}": interval(ends[a] - ends[b])
            for a, b in (
                ("cj_grpo", "one step"),
                ("eoser, cj_grpo", "eoser, one step"),
                ("mdlm", "one step"),
                ("mdlm", "eoser, cj_grpo"),
                ("mdlm, tokens alike", "mdlm"),
            )
        },
    }


def plot(results: dict[str, Any]) -> Figure:
    figure, axes = panels(3, 2.8)
    for i, factor in enumerate(("0.4", "0.01")):
        cells = [results["factor minus off"][f"1/{factor}/{n}"] for n in PASSES]
        points(axes[0], PASSES, cells, f"factor from {factor}", i + 1)
    axes[0].axhline(0, color="gray", linewidth=0.8)
    named(axes[0], "passes of the model", "right answers (difference)", "held back, against not")
    axes[0].legend()
    for i, arm in enumerate(("eoser, one step", "eoser, cj_grpo")):
        band(axes[1], range(0, STEPS + 1, EVERY), results["gains"][arm], arm, i + 1)
    named(axes[1], "optimizer steps", "right answers (gain)", "one step, trajectory")
    axes[1].legend(loc="upper left")
    across(axes[2], results["gain"], results["gain"].values(), "right answers (share)")
    axes[2].set_title("gain in 36 steps", loc="left", fontweight="bold")
    return figure


if __name__ == "__main__":
    main()
