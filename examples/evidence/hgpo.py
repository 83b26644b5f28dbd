"""HGPO's mechanism, measured: bias and variance of the advantages of turns when the past matters.

    python examples/evidence/hgpo.py --seeds 10 --out evidence-results

An agent sees one of 3 states and chooses one of 2 actions, 8 times. Reward and next state are drawn from tables that
depend on the state before, the state and the action, and so does the policy, as a prompt with a memory of one turn
lets it; how much the state before matters is set by `past`, from 0 (not at all) to 1. The true advantage Q - V of every
action is computed by backward induction with the same discount (0.5).

Compared on the same rollouts, with differences from the mean (mean_norm): depth 0 alone (GiGPO's step term), HGPO with
one state of history and the weights of paper and code, and the deepest group alone (weights 1:2^40). For every cell of
turn, state before, state and action, the mean error is the bias and the rest is variance; reported are squared bias
(less what the finite number of samples adds), variance and their sum, the mean squared error, as shares of the mean
square of the true advantage. A turn that has nobody to be compared with counts with its advantage of 0.

Advantages come from the method itself through the driver. Intervals are 95 % Student intervals over seeds; a seed draws
3 worlds and 640 rollouts of each, the same worlds for every size and share of the past.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import arguments, named, points, record, save, summary
from matplotlib.figure import Figure

from rl_plugins.lab.compare.figures import name_lines, panels
from rl_plugins.methods.hgpo import Hgpo
from rl_plugins.testing import make_rollouts, make_turns, one_step, start_stack

STATES, ACTIONS, TURNS, GAMMA = 3, 2, 8, 0.5
SIZES = (4, 8, 16, 32)
PASTS = (0.0, 0.5, 1.0)
WORLDS, ROLLOUTS = 3, 640
PARTS = ("squared_bias", "variance", "mean_squared_error")
ARMS = {
    "depth 0 (GiGPO)": {"history_length": 0},
    "HGPO": {"history_length": 1},
    "HGPO, code's weights 2:3": {"history_length": 1, "weight_offset": 2},
    "deepest only": {"history_length": 1, "length_weight_alpha": 40.0},
}


class World:
    """Tables of (state before, state, action); the state before the first turn has a row of its own."""

    def __init__(self, past: float, rng: np.random.Generator) -> None:
        def mixed(*shape: int) -> np.ndarray:
            """Normal entries of variance 1, of which `past` depends on the state before."""
            common, own = rng.normal(size=(1, *shape)), rng.normal(size=(STATES + 1, *shape))
            return np.sqrt(1 - past) * common + np.sqrt(past) * own

        self.reward = mixed(STATES, ACTIONS)
        self.policy = softmax(mixed(STATES, ACTIONS))
        self.next = softmax(mixed(STATES, ACTIONS, STATES))

    def advantages(self) -> np.ndarray:
        """(turns left, state before, state, action) true advantages."""
        value, out = np.zeros((STATES + 1, STATES)), [np.zeros_like(self.reward)]
        for _ in range(TURNS):
            q = self.reward + GAMMA * np.einsum("bsan,sn->bsa", self.next, value[:STATES])
            value = (self.policy * q).sum(-1)
            out.append(q - value[..., None])
        return np.array(out)

    def walk(self, n: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """(rollouts, turns) states before, states, actions and rewards, which have noise of deviation 0.5."""
        before, state = np.full(n, STATES), rng.integers(0, STATES, size=n)
        columns: list[tuple[np.ndarray, ...]] = []
        for _ in range(TURNS):
            action = draw(self.policy[before, state], rng)
            reward = self.reward[before, state, action] + 0.5 * rng.normal(size=n)
            columns.append((before, state, action, reward))
            before, state = state, draw(self.next[before, state, action], rng)
        b, s, a, r = (np.stack(c, axis=1) for c in zip(*columns, strict=True))
        return b, s, a, r


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def draw(chances: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    return (rng.random((len(chances), 1)) > chances.cumsum(1)[:, :-1]).sum(1)


def errors(past: float, size: int, seed: int) -> dict[str, tuple[float, float, float]]:
    """Squared bias, variance and mean squared error of every arm, in percent of the true advantage's mean square."""
    sums, true_square = {arm: np.zeros(3) for arm in ARMS}, 0.0
    for number in range(WORLDS):
        world = World(past, np.random.default_rng([seed, number]))
        before, state, action, reward = world.walk(ROLLOUTS, np.random.default_rng([seed, number, size]))
        cell = (np.arange(TURNS, 0, -1), before, state, action)
        true = world.advantages()[cell].reshape(-1)
        true_square += (true**2).mean()
        cell_number = np.ravel_multi_index(
            np.broadcast_arrays(*cell), (TURNS + 1, STATES + 1, STATES, ACTIONS)
        ).reshape(-1)
        steps = make_turns([[str(s) for s in row] for row in state], reward.tolist())
        group = np.arange(ROLLOUTS) // size
        rollouts = make_rollouts(reward.sum(1), group, lengths=[TURNS] * ROLLOUTS, turns=steps)
        for arm, params in ARMS.items():
            method = Hgpo(Hgpo.Params(mode="mean_norm", gamma=GAMMA, **params))
            error = one_step(start_stack(method), rollouts).advantages.numpy() - true
            sums[arm] += bias_and_variance(error, cell_number)
    return {arm: tuple(100 * total / true_square) for arm, total in sums.items()}


def bias_and_variance(error: np.ndarray, cell: np.ndarray) -> np.ndarray:
    """Squared bias, variance, mean square of the error; cells with a single sample are left out of the first two."""
    n = np.bincount(cell)
    several = n > 1
    mean = np.bincount(cell, error)[several] / n[several]
    square = np.bincount(cell, error**2)[several] / n[several]
    n = n[several]
    variance = (square - mean**2) * n / (n - 1)
    weight = n / n.sum()
    return np.array([((mean**2 - variance / n) * weight).sum(), (variance * weight).sum(), (error**2).mean()])


def records(r: Any) -> Iterator[dict[str, Any]]:
    """What the cards say."""
    yield record(
        "hgpo",
        "squared bias of the credit where the past matters fully, against comparing states alone",
        "lower",
        r["1.0 | 8 | HGPO"],
        r["1.0 | 8 | depth 0 (GiGPO)"],
        unit="%",
    )
    yield record(
        "hgpo",
        "squared bias of the credit where the past matters fully, against the deepest group alone",
        "lower",
        r["1.0 | 8 | HGPO"],
        r["1.0 | 8 | deepest only"],
        unit="%",
    )


def main() -> None:
    args = arguments(__doc__.splitlines()[0], seeds=10)
    logging.getLogger("rl_plugins").setLevel(logging.ERROR)
    start = time.time()
    result: dict = {"seeds": args.seeds, **{part: {} for part in PARTS}, "mean_squared_error_minus_depth_0": {}}
    print(f"{'past':>5}{'size':>5}" + "".join(f"{a:>27}" for a in ARMS) + "   (bias^2 + variance = error, %)")
    for past in PASTS:
        for size in SIZES:
            runs = [errors(past, size, seed) for seed in range(args.seeds)]
            line = f"{past:>5}{size:>5}"
            for arm in ARMS:
                key = f"{past} | {size} | {arm}"
                for i, part in enumerate(PARTS):
                    result[part][key] = summary([r[arm][i] for r in runs])
                difference = summary([r[arm][2] - r["depth 0 (GiGPO)"][2] for r in runs])
                result["mean_squared_error_minus_depth_0"][key] = difference
                line += " + ".join(f"{result[part][key]['mean']:.0f}" for part in PARTS[:2]).rjust(11)
                line += f" {difference['mean']:+6.0f} +-{difference['ci95']:<5.0f}"
            print(line)
    save(
        args.out,
        "hgpo",
        result,
        lambda: plot(result),
        start,
        records=records(result["squared_bias"]),
        where="gigpo-3-seeds-hgpo-10-seeds",
    )


def plot(result: dict) -> Figure:
    figure, axes = panels(2 * len(PASTS), 2.4)
    for pair, past in zip(zip(axes[::2], axes[1::2], strict=True), PASTS, strict=True):
        for axis, part, label in zip(pair, PARTS[::2], ("squared bias", "mean squared error"), strict=True):
            for i, arm in enumerate(ARMS):
                points(axis, SIZES, [result[part][f"{past} | {size} | {arm}"] for size in SIZES], arm, i)
            axis.set_xscale("log", base=2)
            named(axis, "rollouts per group", f"{label} (% of the true mean square)", f"Share of the past: {past}")
    name_lines(figure)
    return figure


if __name__ == "__main__":
    main()
