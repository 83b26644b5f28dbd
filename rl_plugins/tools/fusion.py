"""Fusion of experts that were trained from the same weights: DORA, "LongCat-Flash-Thinking Technical Report" (arXiv
2509.18883), with DARE's dropout (arXiv 2311.03099) and the select, calculate and erase steps of SCE (arXiv 2408.07990).

For every tensor, with the base's weights b and those of expert i, e_i:

    tau_i = e_i - b                                                     what expert i learned
    tau_i = tau_i * mean_j |tau_j| / |tau_i|                            normalize: L2 norms, over the j with tau_j != 0
    tau_i = Bernoulli(keep) / keep * tau_i                              dropout
    tau_i = 0 where the variance over experts is not among the largest  select: int(select_topk * numel) elements stay
    g_i   = 1, or mean(tau_i^2) / sum_j mean(tau_j^2)                   weights: "equal" or "sce"
    k_i   = (sign(tau_i) = majority), majority = + if sum_j tau_j >= 0  erase: a zero has no sign and k_i = 0
    fused = b + sum_i g_i k_i tau_i / max(sum_i g_i k_i, floor)         floor: 1 for "equal", 1e-6 for "sce"

Reconstruction: the report names normalization, dropout and erasing and publishes no code. The norm (L2 of each tensor),
the keep rate 0.9, and equal weights over the survivors are ours. "sce" weights and `select_topk` follow the cited SCE.

The dropout alone keeps the mean of a delta. With erasing, only survivors count in the denominator, and the mean of N
equal experts becomes (1 - (1 - keep)^N) / keep times as large: 1.1 times for N = 2 and keep 0.9. keep 1 avoids it.

Deltas are float32. Sums over elements or experts are float64, in chunks, so results depend neither on the order of the
experts nor on the number of threads.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from rl_plugins.core.errors import ConfigError, shown

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
CHUNK = 1 << 16  # elements that are worked on at a time: temporary arrays have this size, not that of a tensor
WEIGHTS = ("equal", "sce")


@dataclass(frozen=True)
class FusionRule:
    """What a fusion does with the deltas of the experts. The defaults are those of the module's first lines.

    Args:
        normalize: give the deltas of all experts the same L2 norm, tensor by tensor: their mean.
        keep: probability in (0, 1] with which an element of a delta survives the dropout; the rest is divided by it.
        select_topk: share in (0, 1] of each tensor's elements that stay, those of the largest variance over experts.
            With one expert nothing is selected.
        erase: drop elements whose sign is not that of the sum over experts.
        weights: "equal", or "sce": proportional to the mean square of each expert's delta.
        seed: seed of the dropout. The stream of random numbers depends on it, the expert's name and the tensor's name.

    Raises:
        ConfigError: a value out of range.
    """

    normalize: bool = True
    keep: float = 0.9
    select_topk: float = 1.0
    erase: bool = True
    weights: str = "equal"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("keep", "select_topk"):
            if not 0 < getattr(self, name) <= 1:
                option = f"--{name.replace('_', '-')}"
                raise ConfigError(f"{option} is {getattr(self, name)!r}. It must be in (0, 1]; 1 switches it off.")
        if self.weights not in WEIGHTS:
            raise ConfigError(f"--weights is {shown(self.weights)}. It must be {' or '.join(WEIGHTS)}.")


def fuse(base: npt.ArrayLike, experts: Mapping[str, npt.ArrayLike], rule: FusionRule, tensor: str = "weight") -> Floats:
    """Fuses one tensor in memory.

    Args:
        base: weights that all experts started from, any shape.
        experts: name -> weights of the same shape.
        rule: what is done.
        tensor: name of the tensor; the dropout depends on it.

    Returns:
        The fused weights, float32. Where no expert leaves a change they are those of the base.
    """
    start = np.asarray(base, np.float32)
    fusion = TensorFusion(
        {name: delta(np.asarray(e, np.float32), start).ravel() for name, e in experts.items()}, rule, tensor
    )
    flat, out = start.ravel(), np.empty(start.size, np.float32)
    for span in spans(flat.size):
        out[span] = fusion.added(flat[span], span)
    return out.reshape(start.shape)


def delta(expert: Floats, base: Floats) -> Floats:
    """expert - base in float32, and 0 where both are equal, infinities too."""
    with np.errstate(invalid="ignore", over="ignore"):
        return np.where(expert == base, np.float32(0), expert - base)


class TensorFusion:
    """The fusion of one tensor, whose result is asked for chunk by chunk.

    Args:
        deltas: expert's name -> its delta, one-dimensional float32. They are changed in place, and no further array of
            this size is made but one for `select_topk`.
        rule: what is done.
        tensor: name of the tensor.

    Attributes:
        norms: expert's name -> L2 norm of its delta as it was given.
        survivors: expert's name -> elements of it in the results that were asked for.
    """

    def __init__(self, deltas: Mapping[str, Floats], rule: FusionRule, tensor: str) -> None:
        self._rule = rule
        self._deltas = dict(sorted(deltas.items()))  # the order in which the user names experts changes no bit
        self.norms = {name: math.sqrt(_squares(d)) for name, d in self._deltas.items()}
        self.survivors = dict.fromkeys(self._deltas, 0)
        if rule.normalize:
            self._normalize()
        if rule.keep < 1:
            for name, d in self._deltas.items():
                _drop(d, rule.keep, stream(rule.seed, name, tensor))
        if rule.select_topk < 1 and len(self._deltas) > 1:
            self._select()
        self.weights = sce_weights(self._deltas) if rule.weights == "sce" else dict.fromkeys(self._deltas, 1.0)

    def _normalize(self) -> None:
        present = [norm for norm in self.norms.values() if norm > 0]
        for name, d in self._deltas.items():
            if self.norms[name] > 0:
                factor = math.fsum(present) / len(present) / self.norms[name]
                for span in spans(d.size):
                    d[span] = d[span].astype(np.float64) * factor

    def _variance(self, span: slice) -> Floats:
        chunk = self._chunk(span)
        return np.square(chunk - chunk.mean(0)).mean(0).astype(np.float32)

    def _select(self) -> None:
        size = next(iter(self._deltas.values())).size
        stay = int(self._rule.select_topk * size)
        ranked = np.empty(size, np.float32)
        for span in spans(size):
            ranked[span] = self._variance(span)
        above, equal = np.float32(np.inf), 0  # of the elements with this variance so many stay, the first ones
        if stay > 0:
            ranked.partition(size - stay)
            above = ranked[size - stay]
            equal = stay - sum(int((ranked[span] > above).sum()) for span in spans(size))
        del ranked
        for span in spans(size):
            variance = self._variance(span)
            tied = variance == above
            kept = (variance > above) | (tied & (np.cumsum(tied) <= equal))
            equal -= int((tied & kept).sum())
            for d in self._deltas.values():
                d[span] = np.where(kept, d[span], np.float32(0))

    def _chunk(self, span: slice) -> Doubles:
        return np.stack([d[span] for d in self._deltas.values()]).astype(np.float64)

    def added(self, base: Floats, span: slice) -> Floats:
        """The fused weights of these elements, float32: `base` where nothing survives."""
        chunk = self._chunk(span)
        kept = signs_agree(chunk) if self._rule.erase else np.ones(chunk.shape, bool)
        for name, row in zip(self._deltas, kept & (chunk != 0), strict=True):
            self.survivors[name] += int(row.sum())
        weights = np.array([[g] for g in self.weights.values()]) * kept
        floor = 1e-6 if self._rule.weights == "sce" else 1.0
        change = (weights * chunk).sum(0) / np.maximum(weights.sum(0), floor)
        with np.errstate(invalid="ignore", over="ignore"):
            return np.where(change == 0, base, (base + change).astype(np.float32))


def signs_agree(deltas: npt.NDArray[np.floating[Any]]) -> npt.NDArray[np.bool_]:
    """SCE's erase step: which elements have the sign of the sum over experts (axis 0; a sum >= 0 counts as +). A zero
    has no sign and does not agree."""
    majority = np.where(deltas.sum(0) >= 0, 1.0, -1.0)
    return np.asarray(np.sign(deltas) == majority)


def sce_weights(deltas: Mapping[str, Floats]) -> dict[str, float]:
    """SCE's calculate step: mean(tau_i^2) / sum_j mean(tau_j^2) for every expert; equal shares if all are zero."""
    squares = {name: _squares(d) for name, d in deltas.items()}
    total = math.fsum(squares.values())
    return {name: square / total if total > 0 else 1 / len(squares) for name, square in squares.items()}


def stream(seed: int, expert: str, tensor: str) -> np.random.Philox:
    """The random bits of one expert's tensor: the same whatever else is fused, and in every version of numpy."""
    text = "\0".join([str(seed), expert, tensor]).encode()
    return np.random.Philox(key=int.from_bytes(hashlib.sha256(text).digest()[:16], "little"))


def spans(size: int) -> Iterator[slice]:
    """Slices of `CHUNK` elements that cover a tensor of this size."""
    for start in range(0, size, CHUNK):
        yield slice(start, min(start + CHUNK, size))


def _drop(values: Floats, keep: float, bits: np.random.Philox) -> None:
    below = np.uint64(int(keep * 2**53))
    for span in spans(values.size):
        drawn = np.asarray(bits.random_raw(span.stop - span.start)) >> np.uint64(11)
        values[span] = np.where(drawn < below, values[span] / np.float32(keep), np.float32(0))


def _squares(values: Floats) -> float:
    return math.fsum(float(np.square(values[span], dtype=np.float64).sum()) for span in spans(values.size))
