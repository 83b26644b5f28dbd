"""The diffusion trainer: what it does beside the model, and steps of flat groups, trees, pruned trees and two stages.

`books` is the trainer with a model that costs next to nothing: 32 prompts of 16 samples, 20 steps, latents of 64
numbers. Parts, in CPU milliseconds of a batch: `sampling` (programs, noise, transitions), `driver` (rows of all
samples, decisions, parts of the ranks), `other` (prompts, rewards), `update` (passes, loss, gradients).

`steps` is the demo's DiT of 200,132 parameters with 2 prompts of 16 samples and 20 steps, in CPU seconds of a batch.
`plain torch` is the same batch written as two loops, without this package. Two stages explore 64 seeds per prompt in 6
steps with a copy in bfloat16, whose refresh is part of `update`. Arms take turns; the ratio is the median over
repetitions of the arm's step to that of `flat` in the same repetition.

    python benchmarks/diffusion.py
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.update(HF_HUB_OFFLINE="1", TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1")

import torch
from torch import Tensor, nn

from rl_plugins.diffusion import DiffusionConfig, DiffusionTrainer
from rl_plugins.diffusion.batch import BatchMaker
from rl_plugins.diffusion.flows import shifted_sigmas
from rl_plugins.diffusion.rewards import PolicyEngine
from rl_plugins.lab.demo import shapes
from rl_plugins.runtime.cheap import CheapOptions

torch.set_num_threads(1)
STEPS, SHAPE = 20, (1, 8, 8)
TREE = ["branch_rollout", "branch_advantages"]
CHEAP = CheapOptions("bf16")
BOOKS: dict[str, list[str]] = {"methods: []": [], "mc_grpo": ["mc_grpo"], "branch_grpo": ["branch_grpo"]}
ARMS: dict[str, dict[str, Any]] = {
    "flat": {},
    "mc_grpo": {"methods": ["mc_grpo"]},
    "tree": {"methods": TREE},
    "tree, noise in 4 steps of 8": {
        "methods": TREE,
        "method_params": {"branch_rollout": {"window": 4, "stride": 8}},
    },
    "pruned tree (branch_grpo)": {"methods": ["branch_grpo"]},
    "best and worst of 4 times (sol_rl_select)": {"methods": ["sol_rl_select"]},
    "two stages (sol_rl)": {"methods": ["sol_rl"], "cheap": CHEAP},
    "flat, objective nft": {"objective": "nft"},
    "two stages, objective nft": {"methods": ["sol_rl"], "cheap": CHEAP, "objective": "nft"},
}


class Free(nn.Module):
    """A model that costs next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor, sigma: Tensor, classes: Tensor) -> Tensor:
        return x * self.factor


def light(samples: Tensor, conditions: list[int]) -> Tensor:
    return samples.mean((1, 2, 3))


def trainer(
    folder: str, model: nn.Module, prompts: int, cheap: CheapOptions | None = None, **changes: Any
) -> DiffusionTrainer:
    config = DiffusionConfig(
        output_dir=folder,
        batches=10**6,
        prompts_per_batch=prompts,
        group_size=16,
        steps=STEPS,
        learning_rate=1e-4,
        rows_per_call=512,
        use_cpu=True,
        progress=False,
        **changes,
    )
    scheduler = None if isinstance(model, Free) else shapes.scheduler()
    data = [i % 4 for i in range(max(64, prompts))]
    made = DiffusionTrainer(model, light, data, config, SHAPE, scheduler=scheduler, cheap=cheap)
    made._start()
    made.policy.refresh_cheap()
    return made


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    start = time.process_time()
    result = work()
    return time.process_time() - start, result


# ---- beside the model


def books(repetitions: int, folder: str) -> list[dict[str, Any]]:
    parts: dict[str, float] = {}

    def watch(cls: Any, name: str, part: str) -> None:
        original = getattr(cls, name)

        def counted(*args: Any) -> Any:
            seconds, result = timed(lambda: original(*args))
            parts[part] = parts.get(part, 0.0) + seconds
            return result

        setattr(cls, name, counted)

    watch(PolicyEngine, "denoise", "sampling")
    watch(BatchMaker, "_outlines", "driver")
    watch(BatchMaker, "_decide", "driver")
    arms = {name: trainer(folder, Free(), 32, methods=methods, rows_per_pass=512) for name, methods in BOOKS.items()}
    found: dict[str, list[dict[str, float]]] = {name: [] for name in arms}
    for _ in range(repetitions + 1):
        for name, made in arms.items():
            parts.clear()
            made.policy.conditions.forget()
            whole, batch = timed(lambda made=made: made.batches.make(made.updater.step))
            update, _ = timed(lambda made=made, batch=batch: made.updater.on_batch(batch, made.updater.step))
            found[name].append({**parts, "other": whole - sum(parts.values()), "update": update})
    return [
        {"arm": name, "samples": 512, "transitions": 512 * STEPS}
        | {part: round(1000 * statistics.median(r[part] for r in runs[1:]), 1) for part in runs[0]}
        for name, runs in found.items()
    ]


# ---- steps


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, rng: torch.Generator) -> tuple[float, float]:
    """The batch of `flat` as two loops: seconds of sampling and of the update."""
    sigmas, eta, rows = torch.tensor(shifted_sigmas(STEPS)), 0.3, 2 * 16
    level, classes = torch.arange(STEPS), torch.tensor([0, 1]).repeat_interleave(16)

    def moments(x: Tensor, step: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        s, following = (sigmas[k].view(-1, 1, 1, 1) for k in (step, step + 1))
        d = following - s
        v = model(x, timestep=1000 * s.flatten(), class_labels=which, return_dict=False)[0]
        score = -(x - (1 - s) * (x - s * v)) / s**2
        return x + d * v - 0.5 * eta**2 * score * d, eta * (-d).sqrt()

    def logprob(end: Tensor, mean: Tensor, std: Tensor) -> Tensor:
        z = ((end - mean) / std).flatten(1)
        return -0.5 * z.square().mean(1) - std.flatten().log() - 0.5 * math.log(2 * math.pi)

    def sample() -> tuple[list[Tensor], list[Tensor]]:
        path, old = [torch.randn(rows, *SHAPE, generator=rng)], []
        with torch.no_grad():
            for step in range(STEPS):
                mean, std = moments(path[-1], level[step].expand(rows), classes)
                path.append(mean + std * torch.randn(mean.shape, generator=rng))
                old.append(logprob(path[-1], mean, std))
        return path, old

    def update() -> None:
        reward = light(path[-1], []).view(2, 16)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).flatten()
        optimizer.zero_grad()
        for start in range(0, rows, 8):  # 8 samples, all of their steps at once
            part = slice(start, start + 8)
            before, after = (torch.cat([x[part] for x in path[k : STEPS + k]]) for k in (0, 1))
            mean, std = moments(before, level.repeat_interleave(8), classes[part].repeat(STEPS))
            ratio = (logprob(after, mean, std) - torch.cat([lp[part] for lp in old])).exp()
            a = advantage[part].repeat(STEPS)
            loss = -torch.minimum(ratio * a, ratio.clamp(1 - 1e-3, 1 + 1e-3) * a).sum() / (rows * STEPS)
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()

    sampling, (path, old) = timed(sample)
    return sampling, timed(update)[0]


def steps(repetitions: int, folder: str) -> list[dict[str, Any]]:
    arms = {name: trainer(folder, shapes.build_model(), 2, **options) for name, options in ARMS.items()}
    model, rng = shapes.build_model().eval(), torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in ("plain torch", *arms)}
    counts: dict[str, tuple[float, float, float]] = {"plain torch": (640.0, 640.0, 0.0)}
    for _ in range(repetitions + 1):
        seconds["plain torch"].append(plain_step(model, optimizer, rng))
        for name, made in arms.items():
            made.policy.rows = made.policy.cheap_rows = 0
            sampling, batch = timed(lambda made=made: made.batches.make(made.updater.step))
            update, _ = timed(lambda made=made, batch=batch: made.updater.on_batch(batch, made.updater.step))
            seconds[name].append((sampling, update))
            trained = batch.metrics["rl_plugins/transitions_trained"]
            counts[name] = (made.policy.rows, trained, made.policy.cheap_rows)
    flat = [sum(s) for s in seconds["flat"][1:]]
    return [
        {
            "arm": name,
            "model_passes": counts[name][0],
            "of_copy": counts[name][2],
            "transitions_trained": counts[name][1],
            "sampling": round(statistics.median(s for s, _ in runs[1:]), 4),
            "update": round(statistics.median(u for _, u in runs[1:]), 4),
            "ratio": round(statistics.median(sum(r) / f for r, f in zip(runs[1:], flat, strict=True)), 3),
        }
        for name, runs in seconds.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=15, help="timed batches of every arm")
    given = parser.parse_args()
    gc.freeze()  # without this each collection walks through all imported modules
    with tempfile.TemporaryDirectory() as folder:
        found = {"steps": steps(given.repetitions, folder), "books": books(given.repetitions, folder)}
    Path(__file__).with_suffix(".json").write_text(json.dumps(found, indent=1) + "\n")
    for title, rows in found.items():
        print(title)
        for row in rows:
            print("  " + "  ".join(f"{key}={value}" for key, value in row.items()))


if __name__ == "__main__":
    main()
