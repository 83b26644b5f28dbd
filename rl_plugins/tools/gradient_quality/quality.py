"""Progress, direction and noise of gradient estimates, with intervals, and the batch sizes in which one is ahead."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
BLOCKS = 20  # of the jackknife
LARGEST_NOISE = 1e6  # where nothing is left of the signal


@dataclass(frozen=True)
class Figure:
    """A value and its standard error over batches."""

    value: float
    error: float


@dataclass(frozen=True)
class Quality:
    """Of the estimates that one variant made in one world.

    Attributes:
        noise: of a batch, relative to the squared length of the mean estimate.
        progress, direction: target -> figure.
    """

    noise: Figure
    progress: Mapping[str, Figure]
    direction: Mapping[str, Figure]


def quality(estimates: Array, generated: Array, targets: Mapping[str, Array], rollouts: float) -> Quality:
    """What estimates of a gradient are worth at an equal number of rollouts.

    The noise of a batch is taken to fall with its rollouts, so estimates that cost more or fewer of them than
    `rollouts` are brought to the same number. Squares of means are corrected for the noise that is left in them.

    Args:
        estimates: (batches, dims), at least two batches.
        generated: (batches,) rollouts that each of them cost.
        targets: name -> (dims,) exact gradient.
        rollouts: number at which they are compared.

    Raises:
        ValueError: fewer than two batches.
    """
    n = len(estimates)
    if n < 2:
        raise ValueError(f"{n} batches are given; noise takes two or more.")
    names = list(targets)
    unit = np.stack([targets[name] / np.linalg.norm(targets[name]) for name in names])
    # Sums of which all figures are functions, so that leaving out a block is a subtraction.
    along = estimates @ unit.T
    rows = np.concatenate([estimates, (estimates**2).sum(1)[:, None], along**2, generated[:, None]], axis=1)
    block = np.arange(n) * min(BLOCKS, n) // n
    sums = np.stack([rows[block == b].sum(0) for b in range(block[-1] + 1)])
    sizes = np.bincount(block)
    whole = _figures(sums.sum(0), n, unit, rollouts)
    left = np.stack([_figures(sums.sum(0) - s, n - k, unit, rollouts) for s, k in zip(sums, sizes, strict=True)])
    count = len(left)
    error = np.sqrt((count - 1) / count * ((left - left.mean(0)) ** 2).sum(0))
    found = [Figure(float(v), float(e)) for v, e in zip(whole, error, strict=True)]
    k = len(names)
    return Quality(
        found[0], dict(zip(names, found[1 : k + 1], strict=True)), dict(zip(names, found[k + 1 :], strict=True))
    )


def _figures(total: Array, n: int, unit: Array, rollouts: float) -> Array:
    """Noise, then progress of each target, then direction of each.

    Args:
        total: sums over n batches: the estimates, their squared length, squares along each target, rollouts.
    """
    dims, k = unit.shape[1], len(unit)
    mean, square, square_along, generated = (
        total[:dims] / n,
        total[dims] / n,
        total[dims + 1 : dims + 1 + k] / n,
        total[-1] / n,
    )
    noise = max(float(square - mean @ mean) * n / (n - 1), 0.0)
    signal = max(float(mean @ mean) - noise / n, noise / LARGEST_NOISE, 1e-300)
    along = unit @ mean
    spread = (square_along - along**2) / (n - 1)  # of the mean along each target
    true = np.sign(along) * np.clip(along**2 - spread, 0, None)
    at_equal = noise * generated / rollouts
    direction = np.sign(true) * np.sqrt(np.clip(np.abs(true) / signal, 0, 1))
    return np.array([at_equal / signal, *(true / (signal + at_equal)), *direction])


def progress_at(direction: float, noise: float, rollouts: float, at: float) -> float:
    """Progress at `at` rollouts, of an estimate whose noise was measured at `rollouts`."""
    return direction * abs(direction) / (1 + noise * rollouts / at)
