"""The risk meter of From Spark to Fire (2603.04474): how a false claim spreads over agents that read each other.

    s_i' = (1 - d) s_i + (1 - s_i) (1 - prod_j (1 - b a_ij s_j))          R = b rho(A) / d

s_i is the probability that agent i relies on the claim, a_ij = 1 if i reads j, b the probability that a reader adopts,
d the probability that an agent drops it. A small s grows if and only if R > 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rl_plugins.core.errors import ConfigError, shown


def propagate(reads: Any, start: Any, adoption: float, correction: float, steps: int) -> np.ndarray:
    """Probabilities that each agent relies on a false claim, from the start on.

    All agents are updated at once from the old state.

    Args:
        reads: (agents, agents), a_ij = 1 if i reads j.
        start: (agents,), the probabilities before the first step.
        adoption: b.
        correction: d.
        steps: updates.

    Returns:
        (steps + 1, agents) float64; the first row is `start`.

    Raises:
        ConfigError: a shape or a probability that cannot be.

    Source: arXiv 2603.04474.
    """
    graph = _graph(reads)
    _probability("adoption", adoption)
    _probability("correction", correction)
    state = np.asarray(start, np.float64)
    if state.shape != graph.shape[:1] or not ((state >= 0) & (state <= 1)).all():
        raise ConfigError(f"`start` is {shown(start)}. It must hold a probability for each of {len(graph)} agents.")
    states = [state]
    for _ in range(steps):
        adopt = 1 - np.prod(1 - adoption * graph * state, axis=1)
        state = (1 - correction) * state + (1 - state) * adopt
        states.append(state)
    return np.stack(states)


def spectral_radius(reads: Any) -> float:
    """rho(A), the largest absolute eigenvalue; 0 for a graph without a circle.

    An eigenvalue of a nilpotent matrix is 0, and rounding makes it some 1e-4, so a graph without a circle is found by
    its powers first.
    """
    graph = _graph(reads)
    paths = graph > 0
    for _ in range(len(graph)):
        paths = paths.astype(np.float64) @ (graph > 0) > 0
        if not paths.any():
            return 0.0
    return float(np.abs(np.linalg.eigvals(graph)).max()) if len(graph) else 0.0


def risk(reads: Any, adoption: float, correction: float) -> float:
    """R = b rho(A) / d. Above 1 a small false claim grows. With d = 0 it is infinite, or 0 where nothing spreads."""
    _probability("adoption", adoption)
    _probability("correction", correction)
    spread = adoption * spectral_radius(reads)
    if correction:
        return spread / correction
    return math.inf if spread else 0.0


@dataclass(frozen=True)
class Rates:
    """Rates of a planted marker.

    Attributes:
        adoption: b; NaN if nobody without the marker ever read one with it.
        correction: d; NaN if nobody ever held it.
        exposures: cases of an agent without the marker that read at least one with it.
        held: cases of an agent with the marker.
    """

    adoption: float
    correction: float
    exposures: int
    held: int


def estimate_rates(runs: Sequence[Any], reads: Any) -> Rates:
    """Adoption and correction from logged runs in which a harmless marker claim was planted.

    The marker must be harmless and easy to find in a text, for example a wrong page number that no answer needs. By
    the model above, an agent with it drops it with probability d, and one that reads k agents with it adopts with
    probability 1 - (1 - b)^k. Both are maximum likelihood estimates.

    Args:
        runs: one (rounds, agents) array per run: 1 where the agent's message or answer of that round has the marker.
        reads: (agents, agents), a_ij = 1 if i reads j.

    Raises:
        ConfigError: a shape that cannot be.

    Source: the model is the paper's, the estimate is ours.
    """
    graph = _graph(reads) > 0
    exposed: list[np.ndarray] = []  # k of each case
    adopted: list[np.ndarray] = []
    held = dropped = 0
    for run in runs:
        has = np.asarray(run).astype(bool)
        if has.ndim != 2 or has.shape[1] != len(graph):
            raise ConfigError(f"A run has shape {has.shape}. It must be (rounds, {len(graph)}), a column per agent.")
        before, after = has[:-1], has[1:]
        k = before.astype(np.int64) @ graph.T.astype(np.int64)
        case = ~before & (k > 0)
        exposed.append(k[case])
        adopted.append(after[case])
        held += int(before.sum())
        dropped += int((before & ~after).sum())
    k_all = np.concatenate(exposed) if exposed else np.zeros(0, np.int64)
    took = np.concatenate(adopted) if adopted else np.zeros(0, bool)
    return Rates(_adoption(k_all, took), dropped / held if held else math.nan, len(k_all), held)


def _adoption(k: np.ndarray, adopted: np.ndarray) -> float:
    """The b that maximizes the likelihood of adoptions with probability 1 - (1 - b)^k."""
    if not len(k):
        return math.nan
    if not adopted.any() or adopted.all():
        return float(adopted.all())
    refused = float(k[~adopted].sum())
    sizes, counts = np.unique(k[adopted], return_counts=True)

    def slope(q: float) -> float:  # of the log-likelihood in q = 1 - b, times q
        return refused - float((counts * sizes * q**sizes / (1 - q**sizes)).sum())

    from scipy.optimize import brentq

    return 1 - float(brentq(slope, 1e-12, 1 - 1e-12))


def _graph(reads: Any) -> np.ndarray:
    graph = np.asarray(reads, np.float64)
    if graph.ndim != 2 or graph.shape[0] != graph.shape[1] or not ((graph >= 0) & (graph <= 1)).all():
        raise ConfigError(f"`reads` is {shown(reads)}. It must be a square matrix of 0 and 1, a row per reader.")
    return graph


def _probability(name: str, value: float) -> None:
    if not 0 <= value <= 1:
        raise ConfigError(f"`{name}` is {value:g}. It must be in [0, 1].")
