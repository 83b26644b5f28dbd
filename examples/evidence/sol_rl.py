"""Sol-RL (arXiv 2604.06916): what is left of a choice that a cheap copy makes, and what the choice gives.

1. Spread of the kept rewards. Exact and cheap rewards of a pool of 96 are normal with a given rank correlation; the 24
   best and worst by the cheap reward are kept, by `sol_rl_select`'s own choice. Population deviation of their exact
   rewards, in deviations of the pool, mean over 400 pools per seed. The specification of this method has a simulation
   with 1.68, 1.63, 1.46, 1.18 and 0.97 for the correlations 1, 0.95, 0.8, 0.5 and 0.
2. The cheap copy. The demo's DiT of 200,132 parameters draws shapes of 8 x 8 pixels; every seed draws 96 initial noises
   for each of the 4 classes. Exact: 10 steps of the policy without noise. Cheap: bfloat16, int8, FP4 blocks, or the
   policy itself, in 10, 6 or 3 steps. Rank correlation of cheap and exact rewards in a class, mean of |exact - cheap|
   over the deviation of the exact rewards, and the spread of exact rewards in 24 of 96.
3. Training on the same shapes with the objective nft, 4 prompts with 6 samples of 10 steps, 32 batches. Arms: 6 of 6
   samples (DiffusionNFT); 6 of 24 exact samples (`sol_rl_select`); 6 of 24 seeds explored in 6 steps by a copy in FP4
   or int8 (`sol_rl`); the same with a choice by chance. Reward of 32 samples from fixed seeds, at equal batches, at
   equal passes of the exact policy, and at equal passes of both models. All arms divide advantages by the deviation of
   the batch.

The learning rate was chosen from three on another seed (1e-3 was the best of the first arm).

    python examples/evidence/sol_rl.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import contextlib
import io
import math
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import arguments, band, interval, named, points, record, save, summary
from diffusers import DiTTransformer2DModel
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.core.denoising import Denoise
from rl_plugins.core.groups import Groups
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.diffusion import DiffusionConfig, DiffusionTrainer
from rl_plugins.diffusion.logs import read_metrics
from rl_plugins.lab.compare.figures import panels
from rl_plugins.lab.demo import shapes
from rl_plugins.methods.sol_rl.choice import Mode, places
from rl_plugins.runtime.cheap import CheapCopy, CheapOptions

POOL, KEPT, POOLS = 96, 24, 400
CORRELATIONS = (1.0, 0.95, 0.8, 0.5, 0.0)
MODES: tuple[Mode, ...] = ("best_worst", "mean_deviation", "extremes_random", "random")
SAID = (1.68, 1.63, 1.46, 1.18, 0.97)
PRECISIONS, STEPS = ("policy", "bf16", "int8", "fp4"), (10, 6, 3)
SETTINGS = dict(prompts_per_batch=4, group_size=6, steps=10, learning_rate=1e-3, objective="nft", batches=32)
EVERY = 4
ARMS: dict[str, tuple[list[str], dict[str, Any], str]] = {  # methods, parameters, precision of the copy
    "6 of 6": (["sol_rl_advantages"], {}, "fp4"),
    "6 of 24 exact": (["sol_rl_select", "sol_rl_advantages"], {}, "fp4"),
    "6 of 24 by FP4": (["sol_rl"], {}, "fp4"),
    "6 of 24 by int8": (["sol_rl"], {}, "int8"),
    "6 of 24 by chance": (["sol_rl"], {"sol_rl_explore": {"mode": "random"}}, "fp4"),
}


def spread(exact: Tensor, cheap: Tensor, mode: Mode, generator: torch.Generator) -> float:
    """Deviation of the kept exact rewards over that of the pool, mean over pools (pools, members)."""
    pools, size = exact.shape
    groups = Groups(torch.arange(pools).repeat_interleave(size))
    draw = torch.rand(pools * size, generator=generator, dtype=torch.float64)
    kept = places(cheap.flatten(), groups, torch.full((pools,), KEPT), mode, draw).view(pools, size) >= 0
    return float((exact[kept].view(pools, KEPT).std(1, correction=0) / exact.std(1, correction=0)).mean())


def normal_pools(seed: int) -> dict[str, float]:
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for rank in CORRELATIONS:
        r = 2 * math.sin(math.pi * rank / 6)  # of normal numbers with this rank correlation
        exact, other = torch.randn(2, POOLS, POOL, generator=generator, dtype=torch.float64)
        cheap = r * exact + math.sqrt(1 - r * r) * other
        out |= {f"{mode} {rank:g}": spread(exact, cheap, mode, generator) for mode in MODES}
    return out


def trainer(folder: Path, seed: int, arm: str = "6 of 6", **options: Any) -> DiffusionTrainer:
    methods, params, precision = ARMS[arm]
    args = DiffusionConfig(
        **{**SETTINGS, **options},
        methods=methods,
        method_params=params,
        seed=seed,
        output_dir=str(folder),
        use_cpu=True,
        progress=False,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return DiffusionTrainer(
            DiTTransformer2DModel.from_pretrained(shapes.load_shape_policy()),
            shapes.centred,
            list(range(len(shapes.CLASSES))),
            args,
            (1, shapes.SIZE, shapes.SIZE),
            scheduler=shapes.scheduler(),
            cheap=CheapOptions(precision),
        )


def cheap_copies(seed: int, folder: Path) -> dict[str, float]:
    """Of each copy and number of steps, against the policy in 10 steps."""
    generator = torch.Generator().manual_seed(seed)
    seeds = torch.randint(2**31 - 1, (len(shapes.CLASSES), POOL), generator=generator).tolist()
    out: dict[str, float] = {}
    exact: Tensor | None = None
    for precision in PRECISIONS:
        made = trainer(folder / precision, seed)
        prompts = [made.batches.prompt(PlanRow(-1, i, POOL, edit={"prompt": i})) for i in range(len(seeds))]
        if precision != "policy":
            made.policy.cheap = CheapCopy(made.policy.module, CheapOptions(precision)).module
        for steps in STEPS:
            model: Any = "policy" if precision == "policy" else "cheap"
            asked = [
                (p, Denoise(p.start(s, steps), stochastic=False, model=model))
                for p, of in zip(prompts, seeds, strict=True)
                for s in of
            ]
            latents = torch.stack([x.latent for (x,) in made.engine.denoise(asked)])
            classes = [i for i in range(len(seeds)) for _ in range(POOL)]
            reward = shapes.centred(latents, classes).double().view(len(seeds), POOL)
            if exact is None:
                exact = reward
                continue  # the exact rewards themselves
            groups = Groups(torch.arange(len(seeds)).repeat_interleave(POOL))
            ranks = [groups.rank(v.flatten()).view(len(seeds), POOL) for v in (exact, reward)]
            x, y = (v - v.mean(1, keepdim=True) for v in ranks)
            key = f"{precision} {steps}"
            out[f"rank {key}"] = float(((x * y).sum(1) / (x.square().sum(1) * y.square().sum(1)).sqrt()).mean())
            out[f"gap {key}"] = float(((exact - reward).abs().mean(1) / exact.std(1, correction=0)).mean())
            out[f"spread {key}"] = spread(exact, reward, "best_worst", generator)
    assert exact is not None
    out["spread exact"] = spread(exact, exact, "best_worst", generator)
    return out


def train(arm: str, seed: int, folder: Path) -> dict[str, np.ndarray]:
    """Reward at every evaluation, exact and cheap passes until then, and the mean rank correlation while exploring."""
    trainer(folder, seed, arm, sheet_every=EVERY).train()
    lines = read_metrics(folder)
    at = [i for i, line in enumerate(lines) if line.get("sheet/reward") is not None]
    cheap = np.cumsum([line.get("rl_plugins/cheap_passes", 0.0) for line in lines])
    every = np.cumsum([line.get("rl_plugins/model_passes", 0.0) for line in lines])
    ranks = [line["sol_rl_explore/rank_correlation"] for line in lines if "sol_rl_explore/rank_correlation" in line]
    return {
        "reward": np.array([lines[i]["sheet/reward"] for i in at]),
        "batches": np.array([lines[i]["batch"] for i in at], dtype=float),
        "exact": (every - cheap)[at],
        "all": every[at],
        "rank": np.array([np.mean(ranks) if ranks else np.nan]),
    }


def compared(runs: dict[str, list[dict[str, np.ndarray]]], arm: str) -> dict[str, Any]:
    """Rewards of an arm, and minus those of plain groups of the same seed."""
    least = {what: min(run[what][-1] for of in runs.values() for run in of) for what in ("exact", "all")}

    def at(run: dict[str, np.ndarray], what: str) -> float:
        if what == "mean over batches":
            return float(run["reward"][1:].mean())
        if what == "8 batches":
            return float(np.interp(8, run["batches"], run["reward"]))
        if what == "the end":
            return float(run["reward"][-1])
        kind = "exact" if what == "equal exact passes" else "all"
        return float(np.interp(least[kind], run[kind], run["reward"]))

    out: dict[str, Any] = {}
    for what in ("mean over batches", "8 batches", "the end", "equal exact passes", "equal passes of both"):
        mine, plain = ([at(run, what) for run in of] for of in (runs[arm], runs["6 of 6"]))
        out[what] = interval(mine)
        out[f"{what}, minus 6 of 6"] = interval(np.array(mine) - np.array(plain))
    for what in ("exact", "all"):
        out[f"{what} passes per batch"] = interval([run[what][-1] / run["batches"][-1] for run in runs[arm]])
    if not np.isnan(runs[arm][0]["rank"][0]):
        out["rank correlation of the kept"] = interval([run["rank"][0] for run in runs[arm]])
    return out


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "sol_rl",
        "reward of a small policy of images, mean over 32 batches, 6 of 24 seeds explored in FP4",
        "higher",
        r["6 of 24 by FP4"]["mean over batches"],
        r["6 of 6"]["mean over batches"],
        baseline="6 of 6 samples",
    )
    yield record(
        "sol_rl",
        "reward of a small policy of images, 6 of 24 seeds explored in FP4, at equal passes of both models",
        "higher",
        difference=r["6 of 24 by FP4"]["equal passes of both, minus 6 of 6"],
        baseline="6 of 6 samples",
        budget="passes of the model",
    )


def main() -> None:
    args, start = arguments(__doc__, seeds=5), time.time()
    pools = [normal_pools(seed) for seed in range(args.seeds)]
    spreads = {key: interval([p[key] for p in pools]) for key in pools[0]}
    for key, cell in spreads.items():
        print(f"{key:24s} {cell['mean']:.3f} +- {cell['ci95']:.3f}")
    copies: list[dict[str, float]] = []
    runs: dict[str, list[dict[str, np.ndarray]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            copies.append(cheap_copies(seed, Path(folder) / f"copies-{seed}"))
            for arm in ARMS:
                runs[arm].append(train(arm, seed, Path(folder) / f"{arm}-{seed}"))
                print(
                    f"seed {seed}  {arm:20s} {runs[arm][-1]['reward'].round(3)}  {time.time() - start:.0f} s",
                    flush=True,
                )
    of_copies = {key: interval([c[key] for c in copies]) for key in copies[0]}
    for key, cell in of_copies.items():
        print(f"{key:24s} {cell['mean']:.3f} +- {cell['ci95']:.3f}")
    trained = {arm: compared(runs, arm) for arm in ARMS}
    for arm, cells in trained.items():
        print(arm, "   ".join(f"{k} {v['mean']:.3f} +- {v['ci95']:.3f}" for k, v in cells.items()), flush=True)
    results = {"spread": spreads, "said": dict(zip(map(str, CORRELATIONS), SAID, strict=True)), "copies": of_copies}
    save(
        args.out,
        "sol_rl",
        {
            "method": "sol_rl",
            "settings": {**SETTINGS, "seeds": args.seeds},
            "results": {**results, "training": trained},
        },
        lambda: plot(spreads, of_copies, runs),
        start,
        records=records(trained),
        where="sol_rl-5-seeds",
    )


def plot(spreads: dict[str, Any], copies: dict[str, Any], runs: dict[str, list[dict[str, np.ndarray]]]) -> Figure:
    figure, axes = panels(4)
    for i, mode in enumerate(("best_worst", "mean_deviation", "random")):
        points(axes[0], CORRELATIONS, [spreads[f"{mode} {r:g}"] for r in CORRELATIONS], mode, i)
    named(
        axes[0], "rank correlation of cheap and exact", "deviation of what is kept / of the pool", "24 of 96, simulated"
    )
    for i, precision in enumerate(PRECISIONS):
        steps = [s for s in STEPS if f"rank {precision} {s}" in copies]
        points(axes[1], steps, [copies[f"rank {precision} {s}"] for s in steps], precision, i)
    named(axes[1], "steps of the cheap model", "rank correlation with 10 exact steps", "Copies of the demo's policy")
    for axis, what, x, title in (
        (axes[2], "batches", "batches", "Reward per batch"),
        (axes[3], "exact", "passes of the exact policy", "Reward per pass of the policy"),
    ):
        for i, (arm, of) in enumerate(runs.items()):
            band(axis, of[0][what], [summary(column) for column in np.stack([r["reward"] for r in of]).T], arm, i)
        named(axis, x, "reward, fixed seeds (1 at most)", title)
    for axis in axes:
        axis.legend(frameon=False, fontsize=7)
    return figure


if __name__ == "__main__":
    main()
