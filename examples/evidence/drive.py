"""DRIVE (arXiv 2511.06307): are more hard problems solved when training shrinks to them, at equal rollouts?

A simulation without a model. 200 problems have a success rate sigmoid(logit) with logits uniform in [-6, 2]. A
generation batch trains 64 rows; a group of n rollouts moves the logit of its problem by LEARNING * (mean of |A| over
the rollouts, A the group's normalised reward) * n / 8: nothing if all are equal. A share SPREAD of every gain goes to
all problems alike. The plans come from the real method through the driver's own code; every arm trains the same rows.

Measured, per seed, after 300 batches: problems that began below a rate of 0.05 and are now above 0.5 ("solved hard"),
the same for all problems, and mean success over all problems (what is forgotten is not modelled).

    python examples/evidence/drive.py --seeds 5 --out evidence-results
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import across, arguments, interval, record, save
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import panels
from rl_plugins.methods.drive import Drive
from rl_plugins.runtime.plan import first_plan
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

PROBLEMS, ROWS, GROUP, BATCHES, LEARNING, SPREAD = 200, 64, 8, 300, 0.25, 0.002
HALF = {"sizes": (1.0, 0.4, 0.3, 0.15), "batches": (100, 70, 70)}
PAPER = {"sizes": (1.0, 72, 50, 25), "batches": (60, 120, 60), "rollouts": (8, 64, 64, 64)}  # phases as 32, 64, 32, 32
ARMS: dict[str, dict[str, Any] | None] = {
    "uniform": None,
    "uniform, 32 rollouts": {"sizes": (1.0,), "batches": (), "rollouts": (32,)},
    "filter alone, 8 rollouts": HALF,
    "8, then 32 rollouts": {**HALF, "rollouts": (8, 32, 32, 32)},
    "8, then 32, unsolved leave": {**HALF, "rollouts": (8, 32, 32, 32), "keep_unsolved": False},
    "paper's sets, 8, then 64": PAPER,
    "paper's sets, unsolved leave": {**PAPER, "keep_unsolved": False},
}


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def train(arm: str, seed: int) -> dict[str, float]:
    logits = np.random.default_rng([seed, 0]).uniform(-6, 2, PROBLEMS)
    hard = sigmoid(logits) < 0.05
    params = ARMS[arm]
    methods = [] if params is None else [Drive(Drive.Params(**params))]
    run = make_run(dataset_size=PROBLEMS, group_size=GROUP, total_batches=BATCHES)
    stack, rng, order = start_stack(*methods, seed=seed, run=run), np.random.default_rng([seed, 1]), list[int]()
    rows = 0
    for number in range(BATCHES):
        if len(order) < ROWS // GROUP:
            order += np.random.default_rng([seed, 2, number]).permutation(PROBLEMS).tolist()
        proposal, order = order[: ROWS // GROUP], order[ROWS // GROUP :]
        plan = first_plan(stack, proposal, GROUP, ROWS, PROBLEMS)
        group = [row.group for row in plan.rows for _ in range(row.n)]
        prompt = np.array([row.prompt_index for row in plan.rows for _ in range(row.n)])
        right = (rng.random(len(prompt)) < sigmoid(logits)[prompt]).astype(float)
        one_step(stack, make_rollouts(right, group, prompt_index=prompt, lengths=[1] * len(prompt), batch=number))
        stack.metrics.take()
        rows += len(prompt)
        for row in plan.rows:
            share = right[np.array(group) == row.group].mean()
            gain = LEARNING * 2 * np.sqrt(share * (1 - share)) * row.n / 8  # mean |A| of a group, times its rollouts
            logits[row.prompt_index] += gain
            logits += SPREAD * gain
    assert rows == BATCHES * ROWS
    solved = sigmoid(logits) > 0.5
    return {
        "hard problems solved, of all hard": float(solved[hard].mean()),
        "problems solved": float(solved.mean()),
        "mean success": float(sigmoid(logits).mean()),
    }


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "drive",
        "all problems solved at equal rollouts, simulated",
        "higher",
        r["problems solved"]["8, then 32 rollouts"],
        r["problems solved"]["uniform, 32 rollouts"],
        baseline="uniform, 32 rollouts",
        budget="rollouts",
    )
    yield record(
        "drive",
        "all problems solved at equal rollouts, simulated, the paper's sets and 64 rollouts",
        "higher",
        r["problems solved"]["paper's sets, 8, then 64"],
        r["problems solved"]["uniform, 32 rollouts"],
        baseline="uniform, 32 rollouts",
        budget="rollouts",
    )
    yield record(
        "drive",
        "hard problems solved at equal rollouts, simulated, `keep_unsolved: false`",
        "higher",
        r["hard problems solved, of all hard"]["8, then 32, unsolved leave"],
        r["hard problems solved, of all hard"]["uniform, 32 rollouts"],
        baseline="uniform, 32 rollouts",
        budget="rollouts",
    )


def main() -> None:
    args, start = arguments(__doc__ or "", seeds=5), time.time()
    runs = {arm: [train(arm, seed) for seed in range(args.seeds)] for arm in ARMS}
    results: dict[str, Any] = {}
    for name in runs["uniform"][0]:
        values = {arm: np.array([r[name] for r in found]) for arm, found in runs.items()}
        results[name] = {arm: interval(v) for arm, v in values.items()}
        results[name] |= {f"{arm} - uniform": interval(v - values["uniform"]) for arm, v in values.items()}
        print(name)
        for arm, r in results[name].items():
            print(f"  {arm:40s} {r['mean']:8.3f} +- {r['ci95']:.3f}")
    settings = dict(problems=PROBLEMS, rows=ROWS, batches=BATCHES, learning=LEARNING, spread=SPREAD, seeds=args.seeds)
    content = {"method": "drive", "settings": settings, "results": results}
    save(args.out, "drive", content, lambda: plot(results), start, records=records(results), where="drive-5-seeds")


def plot(results: dict[str, Any]) -> Figure:
    figure, axes = panels(len(results), 2.0, sharey=True)
    for axis, (title, arms) in zip(axes, results.items(), strict=True):
        across(axis, ARMS, [arms[arm] for arm in ARMS], title)
    axes[0].set_ylim(len(ARMS) - 0.5, -0.5)
    return figure


if __name__ == "__main__":
    main()
