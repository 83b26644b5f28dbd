"""BranchGRPO (arXiv 2509.06040): what trees of samples give per pass of the model and per trained transition.

The real diffusion trainer on the demo's shapes: a DiT of 200,132 parameters that draws shapes of 8 x 8 pixels at random
places, and a reward for the middle (1 at most). Every batch has 2 prompts with 16 samples of 20 steps; the settings are
those of `rl-plugins demo branch_grpo`. Seeds begin with the same warm-started policy.

Arms: flat groups with GRPO; trees (splits at steps 0, 3, 6, 9) with the advantages of GRPO, in which shared transitions
are trained in the row of each sample; trees with `branch_advantages`; `branch_grpo` with its pruning of five depths.

1. Training, as many passes of the model in every arm as flat groups take in 32 batches. Measured on 32 samples from
   fixed seeds without noise on the way: the reward at equal batches, at equal passes, and at equal trained transitions.
2. Gradients of 8 batches at the warm-started policy, without a step: noise (variance of the gradient, summed over the
   parameters) over signal (squared norm of its mean), for a batch and at equal passes; the cosine of the mean gradient
   with that of flat groups from other seeds.

    python examples/evidence/branch_grpo.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import contextlib
import io
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.image
import numpy as np
import torch
from common import arguments, interval, minus, named, record, runs_band, save
from diffusers import DiTTransformer2DModel
from matplotlib.figure import Figure
from torch import Tensor

from rl_plugins.diffusion import DiffusionConfig, DiffusionTrainer
from rl_plugins.diffusion.logs import read_metrics
from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.lab.demo import shapes

TREES, ADVANTAGES = "branch_rollout", "branch_advantages"
ARMS: dict[str, tuple[list[str], int]] = {  # methods, and batches
    "flat groups": ([], 32),
    "trees, GRPO's advantages": ([TREES], 52),
    "trees, node advantages": ([TREES, ADVANTAGES], 52),
    "branch_grpo": (["branch_grpo"], 52),
}
SETTINGS = dict(prompts_per_batch=2, group_size=16, steps=20, learning_rate=5e-4)
EVERY, FLAT_BATCHES, REPEATS = 4, 32, 8
PASSES = FLAT_BATCHES * 2 * 16 * 20


def trainer(arm: str, seed: int, folder: Path, classes: list[int], **options: Any) -> DiffusionTrainer:
    model = DiTTransformer2DModel.from_pretrained(shapes.load_shape_policy())
    args = DiffusionConfig(
        **{**SETTINGS, **options},
        methods=ARMS[arm][0],
        seed=seed,
        output_dir=str(folder),
        use_cpu=True,
        progress=False,
    )
    with contextlib.redirect_stdout(io.StringIO()):
        return DiffusionTrainer(
            model, shapes.centred, classes, args, (1, shapes.SIZE, shapes.SIZE), scheduler=shapes.scheduler()
        )


def train(arm: str, seed: int, folder: Path) -> dict[str, np.ndarray]:
    """Curves at every evaluation: reward, and batches, passes and trained transitions until then."""
    made = trainer(arm, seed, folder, list(range(len(shapes.CLASSES))), batches=ARMS[arm][1], sheet_every=EVERY)
    made.train()
    lines = read_metrics(folder)
    passes = np.cumsum([line.get("rl_plugins/model_passes", 0.0) for line in lines])
    trained = np.cumsum([line.get("rl_plugins/transitions_trained", 0.0) for line in lines])
    at = [i for i, line in enumerate(lines) if line.get("sheet/reward") is not None]
    batches = np.array([lines[i]["batch"] for i in at], dtype=float)
    return {
        "reward": np.array([lines[i]["sheet/reward"] for i in at]),
        "batches": batches,
        "passes": passes[at],
        "trained": trained[at],
    }


def gradients(arm: str, seed: int, folder: Path) -> tuple[Tensor, float]:
    """(batches, parameters) gradients at the warm-started policy, and passes per batch."""
    still = {"learning_rate": 0.0, "max_grad_norm": 1e9}
    made = trainer(arm, seed, folder, [0, 1], batches=REPEATS, **still)
    found = []

    def keep(line: Any) -> None:
        found.append(torch.cat([p.grad.flatten() for p in made.policy.trained.values()]))

    history = made.train(on_log=keep)
    return torch.stack(found), history[0]["rl_plugins/model_passes"]


def noise(found: Tensor) -> dict[str, float]:
    """Variance and squared norm of the mean, without the variance's share in it."""
    mean = found.mean(0)
    variance = float((found - mean).square().sum() / (len(found) - 1))
    return {"noise": variance, "signal": float(mean.square().sum()) - variance / len(found)}


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "branch_advantages",
        "reward at equal trained transitions (toy images)",
        "higher",
        difference=minus(
            r["trees, node advantages"]["reward at equal trained"],
            r["trees, GRPO's advantages"]["reward at equal trained"],
        ),
        baseline="GRPO's advantages on the same trees",
        budget="trained transitions",
    )
    yield record(
        "branch_advantages",
        "reward at equal passes of the model (toy images)",
        "higher",
        difference=minus(
            r["trees, node advantages"]["reward at equal passes"],
            r["trees, GRPO's advantages"]["reward at equal passes"],
        ),
        baseline="GRPO's advantages on the same trees",
        budget="passes of the model",
    )
    yield record(
        "branch_pruning",
        "reward at equal trained transitions (toy images)",
        "higher",
        difference=minus(
            r["branch_grpo"]["reward at equal trained"], r["trees, node advantages"]["reward at equal trained"]
        ),
        baseline="the same without pruning",
        budget="trained transitions",
    )
    yield record(
        "branch_pruning",
        "reward at equal passes of the model (toy images)",
        "higher",
        difference=minus(
            r["branch_grpo"]["reward at equal passes"], r["trees, node advantages"]["reward at equal passes"]
        ),
        baseline="the same without pruning",
        budget="passes of the model",
    )
    yield record(
        "branch_rollout",
        "reward at equal passes of the model, GRPO's advantages (toy images)",
        "higher",
        difference=r["trees, GRPO's advantages"]["minus flat at equal passes"],
        baseline="flat groups",
        budget="passes of the model",
    )
    yield record(
        "branch_grpo",
        "reward at equal passes of the model (toy images)",
        "higher",
        difference=r["branch_grpo"]["minus flat at equal passes"],
        baseline="flat groups",
        budget="passes of the model",
    )
    yield record(
        "branch_grpo",
        "reward at equal trained transitions (toy images)",
        "higher",
        difference=r["branch_grpo"]["minus flat at equal trained"],
        baseline="flat groups",
        budget="trained transitions",
    )


def main() -> None:
    args, start = arguments(__doc__, seeds=5), time.time()
    curves: dict[str, list[dict[str, np.ndarray]]] = {arm: [] for arm in ARMS}
    found: dict[str, list[Tensor]] = {arm: [] for arm in ARMS}
    cost: dict[str, float] = {}
    sheets: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(args.seeds):
            for arm in ARMS:
                place = Path(folder) / f"{seed}-{arm}"
                curves[arm].append(train(arm, seed, place))
                if seed == 0:
                    drawn = sorted((place / "sheets").iterdir())
                    sheets.setdefault("before training", matplotlib.image.imread(drawn[0]))
                    sheets[arm] = matplotlib.image.imread(drawn[-1])
                found_, cost[arm] = gradients(arm, seed, place / "gradients")
                found[arm].append(found_)
                last = curves[arm][-1]["reward"][-1]
                print(f"seed {seed}  {arm:26s} reward {last:.3f}  {time.time() - start:4.0f} s", flush=True)
    results = {arm: {**of_curves(curves, arm), **of_gradients(found, cost, arm)} for arm in ARMS}
    for arm, cells in results.items():
        print(arm, "   ".join(f"{k} {v['mean']:.4g} +- {v['ci95']:.2g}" for k, v in cells.items()), flush=True)
    settings = {**SETTINGS, "passes": PASSES, "gradient_batches": REPEATS, "seeds": args.seeds}
    save(
        args.out,
        "branch_grpo",
        {"method": "branch_grpo", "settings": settings, "results": results},
        lambda: plot(curves),
        records=records(results),
        where="branch_grpo-on-images-5-seeds",
    )
    args.out.joinpath("branch_grpo_samples.png").unlink(missing_ok=True)
    samples(sheets).savefig(args.out / "branch_grpo_samples.png", dpi=100)
    print(f"{time.time() - start:.0f} s")


def of_curves(curves: dict[str, list[dict[str, np.ndarray]]], arm: str) -> dict[str, Any]:
    """The reward at equal batches, passes and trained transitions, and minus that of flat groups of the same seed."""
    most = {"batches": float(FLAT_BATCHES), "passes": float(PASSES)}
    most["trained"] = min(runs[0]["trained"][-1] for runs in curves.values())

    def at(run: dict[str, np.ndarray], what: str) -> float:
        return float(np.interp(most[what], run[what], run["reward"]))

    out: dict[str, Any] = {}
    for what in most:
        rewards = [at(run, what) for run in curves[arm]]
        flat = [at(run, what) for run in curves["flat groups"]]
        out[f"reward at equal {what}"] = interval(rewards)
        out[f"minus flat at equal {what}"] = interval(np.array(rewards) - np.array(flat))
    for what in ("passes", "trained"):
        out[f"{what} per batch"] = interval([run[what][-1] / run["batches"][-1] for run in curves[arm]])
    return out


def of_gradients(found: dict[str, list[Tensor]], cost: dict[str, float], arm: str) -> dict[str, Any]:
    ratio = [(parts := noise(g))["noise"] / parts["signal"] for g in found[arm]]
    means = {name: torch.stack([g.mean(0) for g in found[name]]) for name in (arm, "flat groups")}
    cosines = []
    for seed in range(len(found[arm])):
        others = torch.cat([means["flat groups"][:seed], means["flat groups"][seed + 1 :]]).mean(0)
        cosines.append(float(torch.nn.functional.cosine_similarity(means[arm][seed], others, dim=0)))
    share = cost[arm] / cost["flat groups"]
    return {
        "noise over signal": interval(ratio),
        "noise over signal, equal passes": interval([share * r for r in ratio]),
        "cosine with flat groups": interval(cosines),
    }


def plot(curves: dict[str, list[dict[str, np.ndarray]]]) -> Figure:
    figure, axes = panels(2)
    for axis, what, name in zip(
        axes, ("passes", "trained"), ("passes of the model", "trained transitions"), strict=True
    ):
        for i, (arm, runs) in enumerate(curves.items()):
            runs_band(axis, runs[0][what] / 1000, [run["reward"] for run in runs], arm, i)
        named(axis, f"thousand {name}", "reward, fixed seeds, no noise (1 at most)", f"Reward per {name.split()[-1]}")
    name_lines(figure)
    return figure


def samples(sheets: dict[str, Any]) -> Figure:
    """Samples from the same seeds: before training, and after it in every arm (seed 0)."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    axes = figure.subplots(2, 3).flatten()
    for axis in axes:
        axis.axis("off")
    for axis, (title, image) in zip(axes, sheets.items(), strict=False):
        axis.imshow(image, interpolation="nearest")
        axis.set_title(title, loc="left", fontsize=10)
    return figure


if __name__ == "__main__":
    main()
