"""Runs of many steps in small worlds, for what one step does not show: the exact mean reward after training."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rl_plugins.lab.quality.drive import Driver, QualityVariant
from rl_plugins.lab.quality.worlds.chain import Chain
from rl_plugins.lab.quality.worlds.tables import table

RATES = (0.5, 1.5, 5.0, 15.0, 50.0)
CHOOSING, MEASURED = 2, 48  # seeds that choose the rate, and those that are reported
STEPS, TRAINED_ROLLOUTS = 60, 64


def train(
    world: Chain, variant: QualityVariant, rate: float, seed: int, steps: int, rollouts: int
) -> tuple[float, float]:
    """The exact mean reward after so many steps of plain gradient ascent, and the rollouts that each step generated."""
    driver, theta, generated = Driver(world, variant, rollouts, seed, steps), world.thetas[-1], 0
    for _ in range(steps):
        made = driver.batch()
        theta, generated = theta + rate * made.gradient, generated + made.generated
        driver.world = replace(world, thetas=theta[None])
    return float(driver.world.pass_rate.mean()), generated / steps


def trained(world: Chain, variant: QualityVariant, rollouts: int) -> dict[str, Any]:
    """The learning rate with the largest mean of some seeds, and the mean reward that other seeds reach with it."""

    def ends(rate: float, seeds: Sequence[int]) -> NDArray[np.float64]:
        steps, each = variant.longer * STEPS, variant.times * rollouts
        return np.array([train(world, variant, rate, seed, steps, each) for seed in seeds])

    tried = [float(ends(rate, range(CHOOSING))[:, 0].mean()) for rate in RATES]
    rate = RATES[int(np.argmax(tried))]
    rewards, generated = ends(rate, range(CHOOSING, CHOOSING + MEASURED)).T
    return {
        "rate": rate,
        "tried": [round(x, 4) for x in tried],
        "rewards": [round(x, 4) for x in rewards.tolist()],
        "generated": round(variant.longer * float(generated.mean()), 1),
    }


def deceptive(prompts: int = 8, length: int = 3) -> Chain:
    """One action ends with 0.35. The other begins a path of `length` right actions, whose end pays 1: at first one
    rollout in 2^length that takes it, so a policy that learns too soon what pays never finds it."""
    states = length + 1
    shape = (prompts, states, 2, 2)
    to, gain = np.full(shape, -1), np.zeros(shape)
    to[:, :-1, 1] = np.arange(1, states)[:, None]
    gain[:, 0, 0], gain[:, -1, 1] = 0.35, 1.0
    features = np.broadcast_to(np.eye(2 * states, dtype=np.float32).reshape(1, states, 2, -1), (*shape[:3], 2 * states))
    theta = np.zeros((1, 2 * states))
    return Chain("deceptive", np.zeros(shape[:3]), features, theta, to, gain, states, turns=True)


def curriculum(seed: int = 0, prompts: int = 256, dims: int = 32) -> Chain:
    """The table `skills` with a policy that moves."""
    of = table("skills", seed, prompts=prompts, dims=dims)
    shape = (prompts, 1, of.prob.shape[1], 2)
    right = np.broadcast_to(of.right[:, None, :, None], shape).astype(float)
    parts = np.log(of.prob)[:, None], of.score[:, None], np.zeros((1, dims)), np.full(shape, -1), right, 1
    return Chain("curriculum", *parts, columns=of.columns)


TRAINED: Mapping[str, Callable[[], Chain]] = {"deceptive": deceptive, "curriculum": curriculum}
ABOUT: Mapping[str, str] = {
    "deceptive": "one action ends with 0.35, the other begins a path of three right actions whose end pays 1",
    "curriculum": "the table of skills, whose hard prompts need other skills than easy ones, with 256 prompts",
}
