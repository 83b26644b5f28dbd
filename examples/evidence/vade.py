"""VADE (arXiv 2511.18902): does choosing prompts by a Beta posterior give more groups with a gradient? Does it help?

A simulation without a model. D prompts have a success rate sigmoid(logit); half of the logits are N(-3.5, 1) (too
hard), half N(3, 1) (too easy). A generation batch is B prompts with G Bernoulli rollouts each; a prompt whose group was
mixed (some right, some wrong) gains +0.15 on its logit, any other gains nothing. The prompts come from the real method
through the driver's own code; the baseline is the host's order (random epochs) through the same code.

Measured, per seed: the share of mixed groups, the mean success over all prompts after the last batch, and whether
prompts that jump from hopeless to a rate of 1/3 are found again (everything else held still).

Found (6 seeds): mixed groups .32 -> .46 (.51 in the second half), mean success .511 -> .551, p(1-p) in between; 100
batches after the jump the prompts are visited as often as those that always had 1/3.

    python examples/evidence/vade.py --seeds 6 --out evidence-results
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from common import arguments, corner_legend, interval, named, record, runs_band, save
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import color, line, panels
from rl_plugins.methods.vade import Vade
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

PROMPTS, BATCH, GROUP, STEPS, GAIN = 2000, 64, 8, 200, 0.15
JUMPING, JUMP_AT, JUMP_STEPS, WINDOW = 100, 150, 400, 20
ARMS = {"uniform": None, "VADE": "p(1-p)^2", "VADE with p(1-p)": "p(1-p)"}


def stack_of(arm: str, seed: int) -> MethodStack:
    methods = [] if ARMS[arm] is None else [Vade(Vade.Params(score=ARMS[arm]))]
    return start_stack(*methods, seed=seed, run=make_run(dataset_size=PROMPTS, group_size=GROUP))


def host_order(rng: np.random.Generator) -> Iterator[list[int]]:
    """Batches of the host's sampler: one random permutation after the other."""
    queue: list[int] = []
    while True:
        if len(queue) < BATCH:
            queue += rng.permutation(PROMPTS).tolist()
        yield queue[:BATCH]
        queue = queue[BATCH:]


def one_batch(stack: MethodStack, rate: np.ndarray, proposal: list[int], rng: np.random.Generator) -> tuple[Any, Any]:
    """Chooses, samples and observes one generation batch; returns the prompts and which groups were mixed."""
    plan = first_plan(stack, proposal, GROUP, BATCH * GROUP, PROMPTS)
    prompts = np.array([row.prompt_index for row in plan.rows])
    correct = rng.random((BATCH, GROUP)) < rate[prompts][:, None]
    rollouts = make_rollouts(
        torch.from_numpy(correct.ravel().astype(float)),
        group_size=GROUP,
        lengths=[1] * BATCH * GROUP,
        prompt_index=torch.from_numpy(np.repeat(prompts, GROUP)),
    )
    one_step(stack, rollouts)
    stack.metrics.take()
    return prompts, correct.any(1) & ~correct.all(1)


def start_logits(rng: np.random.Generator) -> np.ndarray:
    return np.where(np.arange(PROMPTS) % 2 == 0, rng.normal(-3.5, 1, PROMPTS), rng.normal(3, 1, PROMPTS))


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def training(arm: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Mixed share and mean success after each of STEPS batches."""
    logits, rng, order = (
        start_logits(np.random.default_rng([seed, 0])),
        np.random.default_rng([seed, 1]),
        host_order(np.random.default_rng([seed, 2])),
    )
    stack, mixed_share, success = stack_of(arm, seed), [], []
    for _ in range(STEPS):
        prompts, mixed = one_batch(stack, sigmoid(logits), next(order), rng)
        logits[prompts[mixed]] += GAIN
        mixed_share.append(mixed.mean())
        success.append(sigmoid(logits).mean())
    return np.array(mixed_share), np.array(success)


def jump(seed: int) -> dict[str, np.ndarray]:
    """Visits per prompt and batch of prompts that jump from logit -6 to a rate of 1/3, and of controls."""
    rate = sigmoid(start_logits(np.random.default_rng([seed, 3])))
    rng, order = np.random.default_rng([seed, 4]), host_order(np.random.default_rng([seed, 5]))
    kinds = {"jumps at the line": 0, "stays hopeless": 1, "always 1/3": 2}
    member = {kind: np.arange(i * JUMPING, (i + 1) * JUMPING) for kind, i in kinds.items()}
    rate[: 2 * JUMPING], rate[member["always 1/3"]] = sigmoid(np.array(-6.0)), 1 / 3
    stack, visits = stack_of("VADE", seed), {kind: np.zeros(JUMP_STEPS) for kind in kinds}
    for step in range(JUMP_STEPS):
        if step == JUMP_AT:
            rate[member["jumps at the line"]] = 1 / 3
        prompts, _ = one_batch(stack, rate, next(order), rng)
        for kind, rows in member.items():
            visits[kind][step] = np.isin(rows, prompts).mean()
    return visits


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "vade",
        "share of mixed groups, simulated",
        "higher",
        r["mixed groups, all batches"]["VADE"],
        r["mixed groups, all batches"]["uniform"],
        baseline="uniform",
    )
    yield record(
        "vade",
        "mean success at the end, simulated",
        "higher",
        r["mean success at the end"]["VADE"],
        r["mean success at the end"]["uniform"],
        baseline="uniform",
    )


def main() -> None:
    args = arguments(__doc__, seeds=6)
    seeds = range(args.seeds)

    curves = {arm: [training(arm, s) for s in seeds] for arm in ARMS}
    results: dict[str, Any] = {
        "mixed groups, all batches": {a: interval([m.mean() for m, _ in c]) for a, c in curves.items()},
        "mixed groups, second half": {a: interval([m[STEPS // 2 :].mean() for m, _ in c]) for a, c in curves.items()},
        "mean success at the end": {a: interval([s[-1] for _, s in c]) for a, c in curves.items()},
    }
    for name in list(results):
        base = np.array(results[name]["uniform"]["seeds"])
        results[name] |= {
            f"{a} - uniform": interval(np.array(results[name][a]["seeds"]) - base) for a in ARMS if a != "uniform"
        }
    jumps = [jump(s) for s in seeds]
    spans = {"100 batches before": (JUMP_AT - 100, JUMP_AT), "last 100 batches": (JUMP_STEPS - 100, JUMP_STEPS)}
    for name, (start, end) in spans.items():
        results[f"visits per prompt and 100 batches, {name}"] = {
            kind: interval([100 * j[kind][start:end].mean() for j in jumps]) for kind in jumps[0]
        }

    settings = dict(prompts=PROMPTS, batch=BATCH, group=GROUP, steps=STEPS, gain=GAIN, jump_at=JUMP_AT)
    content = {"method": "vade", "settings": {**settings, "seeds": args.seeds}, "results": results}
    save(args.out, "vade", content, lambda: plot(curves, jumps), records=records(results), where="vade-6-seeds")
    for name, arms in results.items():
        print(name)
        for arm, r in arms.items():
            print(f"  {arm:28s} {r['mean']:8.4f} +- {r['ci95']:.4f}")


def plot(curves: dict[str, list[tuple[np.ndarray, np.ndarray]]], jumps: list[dict[str, np.ndarray]]) -> Figure:
    figure, (mixed, success, visits) = panels(3)
    for i, (arm, runs) in enumerate(curves.items()):
        smooth_band(mixed, [m for m, _ in runs], arm, 10, i)
        smooth_band(success, [s for _, s in runs], arm, 1, i)
    named(mixed, "generation batch", "share of groups with a gradient (0 < r < n)")
    named(success, "generation batch", "success rate, mean over all prompts")
    for i, kind in enumerate(jumps[0]):
        smooth_band(visits, [j[kind] for j in jumps], kind, WINDOW, i + 1)
    visits.axvline(JUMP_AT, color=color(0), linestyle=":")
    visits.axhline(BATCH / PROMPTS, label="uniform", **line(0))
    named(visits, "generation batch", "visits per prompt and batch", "Prompts whose rate jumps from 0.002 to 1/3")
    success.legend()
    corner_legend(figure, visits)
    return figure


def smooth_band(axis: Axes, runs: list[np.ndarray], arm: str, smooth: int, i: int) -> None:
    """Series i, each run as its moving mean over `smooth` batches."""
    y = [np.convolve(r, np.ones(smooth) / smooth, mode="valid") for r in runs]
    runs_band(axis, np.arange(len(y[0])) + smooth, y, arm, i)


if __name__ == "__main__":
    main()
