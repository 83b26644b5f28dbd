"""Rollouts of a policy whose exact gradients nobody knows: estimates in one fold of the prompts are compared with the
gradients of the other folds, so that no rollout is judged by itself.

With m_j the mean estimate of fold j, g_l the gradient of fold l without bias, and q the mean squared length of an
estimate, means over pairs of different folds have no bias of their own:

    along = mean <m_j, g_l>     signal = mean <m_j, m_l>     progress = along |along| / (|g|^2 q)

Where two progresses are compared, |g| falls out. Errors are those of the jackknife over folds, which holds for means
over pairs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import comb

from rl_plugins.core.errors import ConfigError
from rl_plugins.tools.gradient_quality.worlds import Answers, AnswerTable

Array = NDArray[np.float64]


class RolloutPool(AnswerTable):
    """Stored rollouts as a world: a batch has the distribution of a fresh one, because no group gets a rollout twice.

    Its `score` keeps its mean, which is noise that training has, too. Where `said` is given, it is the whole text.
    """

    def draw(self, prompt: NDArray[np.int64], group: NDArray[np.int64], rng: np.random.Generator) -> Answers:
        """
        Raises:
            ConfigError: a group is larger than the stored rollouts of a prompt.
        """
        number, size = np.unique(group, return_inverse=True, return_counts=True)[1:]
        if size.max() > self.prob.shape[1]:
            raise ConfigError(
                f"It asks for {size.max()} rollouts of a prompt, and the pool has {self.prob.shape[1]}. Draw more "
                f"(--rollouts)."
            )
        order = np.argsort(number, kind="stable")
        place = np.empty_like(number)
        place[order] = np.arange(len(number)) - np.repeat(size.cumsum() - size, size)
        shuffled = rng.random((len(size), self.prob.shape[1])).argsort(1)
        return self.answers(prompt, shuffled[number, place])

    def texts(self, prompt: NDArray[np.int64], answers: Answers) -> list[str]:
        assert self.said is not None
        return [str(text) for text in self.said.ravel()[answers.piece[:, 0]]]

    def part(self, prompts: Sequence[int]) -> RolloutPool:
        """The pool of some of the prompts."""
        of = list(prompts)
        rows: dict[str, Any] = {
            name: None if (values := getattr(self, name)) is None else values[of]
            for name in ("prob", "rewards", "right", "score", "length", "said")
        }
        columns = {name: [values[i] for i in of] for name, values in self.columns.items()}
        return replace(self, **rows, columns=columns)

    def gradients(self, k: int) -> dict[str, Array]:
        """Target -> (dims,) gradient without bias, a mean over prompts: of the weighted reward, of each of several, of
        pass@1 and pass@k. A rollout's baseline is made of the other rollouts of its prompt."""
        values = {"reward": self.rewards @ np.asarray(self.reward_weights)}
        if len(self.reward_names) > 1:
            values |= {name: self.rewards[..., i] for i, name in enumerate(self.reward_names)}
        n = self.prob.shape[1] - 1
        weights = {name: v - (v.sum(1, keepdims=True) - v) / n for name, v in values.items()}
        for tries in dict.fromkeys((1, min(k, n))):
            won = self.right.sum(1, keepdims=True) - self.right  # of the others
            lost = comb(n - won, tries - 1)
            weights[f"pass@{tries}"] = tries * (
                self.right * lost / comb(n, tries - 1) - won / n * lost / comb(n - 1, tries - 1)
            )
        return {
            name: np.einsum("pk,pkd->d", np.nan_to_num(w), self.score) / self.prob.size for name, w in weights.items()
        }


@dataclass(frozen=True)
class Crossed:
    """What the estimates of a variant are in the folds of a pool.

    Attributes:
        along: target -> (folds, folds) inner product of the mean estimate of a fold and the gradient of another.
        signal: (folds, folds) inner products of mean estimates.
        square: (folds,) mean squared length of an estimate.
        rollouts: (folds,) that one cost.
    """

    along: Mapping[str, Array]
    signal: Array
    square: Array
    rollouts: Array

    def squared_length(self, folds: NDArray[np.int64], at: float) -> float:
        """Of an estimate of so many rollouts: what is left without noise, and the noise, which falls with them."""
        square = float(self.square[folds].mean())
        signal = min(max(_pairs(self.signal, folds), 0.0), square)
        return signal + (square - signal) * float(self.rollouts[folds].mean()) / at


def crossed(estimates: Sequence[Array], rollouts: Sequence[float], gradients: Sequence[Mapping[str, Array]]) -> Crossed:
    """
    Args:
        estimates: of each fold, (batches, dims).
        rollouts: of each fold, that a batch cost on average.
        gradients: of each fold, `RolloutPool.gradients`.
    """
    mean = np.stack([made.mean(0) for made in estimates])
    exact = {name: np.stack([g[name] for g in gradients]) for name in gradients[0]}
    square = np.array([(made**2).sum(1).mean() for made in estimates])
    along = {name: mean @ values.T for name, values in exact.items()}
    return Crossed(along, mean @ mean.T, square, np.asarray(rollouts, float))


def _pairs(matrix: Array, folds: NDArray[np.int64]) -> float:
    """Mean over pairs of different folds."""
    part, n = matrix[np.ix_(folds, folds)], len(folds)
    return float((part.sum() - np.trace(part)) / (n * (n - 1)))


@dataclass(frozen=True)
class FoldInterval:
    """A value with its 95 % interval."""

    value: float
    low: float
    high: float


def jackknife(value: Callable[[NDArray[np.int64]], float], folds: Sequence[int]) -> FoldInterval:
    """A function of folds, with the interval by leaving out each of them."""
    every, n = np.asarray(folds), len(folds)
    left = np.array([value(np.delete(every, i)) for i in range(n)])
    error = np.sqrt((n - 1) / n * ((left - left.mean()) ** 2).sum())
    half = float(stats.t.ppf(0.975, n - 1) * error)
    whole = float(value(every))
    return FoldInterval(whole, whole - half, whole + half)


def along(of: Crossed, target: str, folds: Sequence[int]) -> FoldInterval:
    """Inner product of the mean estimate with the gradient; negative where the step is harmful."""
    return jackknife(lambda f: _pairs(of.along[target], f), folds)


def ahead(of: Crossed, than: Crossed, target: str, at: float, folds: Sequence[int]) -> FoldInterval:
    """Difference of the roots of two progresses at an equal number of rollouts, up to |g|. It needs no division by a
    progress that may be 0."""

    def value(f: NDArray[np.int64]) -> float:
        return _root(of, target, f, at) - _root(than, target, f, at)

    return jackknife(value, folds)


def ratio(of: Crossed, than: Crossed, target: str, at: float, folds: Sequence[int]) -> FoldInterval:
    """Progress of one variant relative to that of another at an equal number of rollouts; negative where the step is
    harmful, NaN where the other makes none."""

    def value(f: NDArray[np.int64]) -> float:
        relative = _root(of, target, f, at) / (_root(than, target, f, at) or math.nan)
        return relative * abs(relative)

    return jackknife(value, folds)


def _root(of: Crossed, target: str, folds: NDArray[np.int64], at: float) -> float:
    length = math.sqrt(of.squared_length(folds, at))
    return _pairs(of.along[target], folds) / length if length else 0.0
