"""ECHO's controller: where a response branches, how widely, and where it is cut. Pure functions on numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Top = Sequence[Sequence[tuple[int, float]]]
"""For every token the most likely ones in its place with their log-probs, most likely first."""

_TINY = 1e-9  # added to probabilities before the logarithm, as in the authors' code
_ROUNDING = 1e-9  # windows of equal numbers have means that differ by less: neither a rise nor a fall
_BOTTOM = 0.1


@dataclass(frozen=True)
class Statistics:
    """Of every place of a response, (places,) each.

    Attributes:
        entropy: of the most likely tokens' probabilities, renormalized, in nats.
        confidence: minus the mean log of the largest of them: large where the distribution is peaked.
        group, tail: mean confidence of the last places, this one included.
        delta: entropy minus its mean over the places before.
        bottom: mean of the lowest tenth of the probabilities.
    """

    entropy: Floats
    confidence: Floats
    group: Floats
    tail: Floats
    delta: Floats
    bottom: Floats

    def __len__(self) -> int:
        return len(self.entropy)


def statistics(top: Top, p: Any) -> Statistics:
    """Of a response whose engine reported `top`.

    Args:
        p: parameters of `echo_tree`.
    """
    logprobs = np.full((len(top), p.logprob_top_k), -np.inf)
    for i, place in enumerate(top):
        given = [logprob for _, logprob in place[: p.logprob_top_k]]
        logprobs[i, : len(given)] = given
    probs = np.exp(logprobs - logprobs.max(axis=1, initial=-1e30, keepdims=True))
    probs = probs / probs.sum(axis=1, keepdims=True)
    count = np.isfinite(logprobs).sum(axis=1)
    order = np.arange(p.logprob_top_k)[None]
    lowest = np.maximum(1, (_BOTTOM * count).astype(int))[:, None]
    entropy = -(probs * np.log(np.maximum(probs, _TINY))).sum(axis=1)
    confidence = -_mean(np.log(probs + _TINY), order < np.minimum(count, p.confidence_top_k)[:, None])
    before = _window(entropy[:-1], p.entropy_window)
    delta = np.concatenate([[0.0] * min(1, len(top)), entropy[1:] - before])
    return Statistics(
        entropy,
        confidence,
        _window(confidence, p.group_window),
        _window(confidence, p.tail_window),
        delta,
        _mean(probs, (order < count[:, None]) & (order >= count[:, None] - lowest)),
    )


def branch_at(s: Statistics, p: Any) -> tuple[int, int] | None:
    """(place, width) of the first place that is uncertain enough; None if there is none or it is too narrow."""
    places = np.arange(len(s))
    uncertain = (s.entropy >= p.entropy_high) & (s.group <= p.branch_threshold)
    uncertain &= (s.delta >= p.entropy_delta_threshold) & (places >= min(p.min_depth, len(s) - 1))
    if not uncertain.any():
        return None
    t = int(uncertain.argmax())
    above = p.alpha * (s.entropy[t] - p.entropy_low) / (p.entropy_high - p.entropy_low)
    sure = p.beta * (s.group[t] - p.branch_threshold) / abs(p.branch_threshold)
    width = int(np.clip(np.round(p.min_branches + above - sure), p.min_branches, p.max_branches))
    return (t, width) if width > 1 else None


def prune_at(s: Statistics, p: Any) -> tuple[int, str] | None:
    """(last place that stays, reason) of the first place where a rule says so; the order of the rules breaks ties."""
    nowhere = np.zeros(len(s), dtype=bool)
    low = nowhere if p.prune_threshold is None else s.group < p.prune_threshold
    decline = rise = nowhere
    if p.tail_threshold is not None:
        falls = np.concatenate([[False], np.diff(s.tail) < -_ROUNDING])[: len(s)]
        decline = (_run(falls) >= p.tail_decline_steps) & (s.tail <= p.tail_threshold)
    if p.delta_upper is not None:
        rise = (_run(s.delta > _ROUNDING) >= p.delta_rise_steps) & (s.delta > p.delta_upper)
    found = low | decline | rise
    if not found.any():
        return None
    t = int(found.argmax())
    return t, "low_confidence" if low[t] else "tail_decline" if decline[t] else "entropy_spike"


def penalty(s: Statistics, t: int) -> float:
    """What the authors' code stores of a pruned response and never uses."""
    return float(s.tail[t] - (1 - s.bottom[t]) - 0.05)


def _mean(x: Floats, where: NDArray[np.bool_]) -> Floats:
    mean: Floats = np.where(where, x, 0.0).sum(axis=1) / where.sum(axis=1)
    return mean


def _window(x: Floats, width: int) -> Floats:
    """Mean of the last `width` values up to each place; fewer at the start."""
    padded = np.concatenate([np.zeros(width - 1), x])
    views = np.lib.stride_tricks.sliding_window_view(padded, width) if len(x) else np.empty((0, width))
    mean: Floats = views.sum(axis=1) / np.minimum(np.arange(len(x)) + 1, width)
    return mean


def _run(x: NDArray[np.bool_]) -> NDArray[np.int64]:
    """How many places in a row, up to each, are True."""
    places = np.arange(len(x))
    last_false = np.maximum.accumulate(np.where(x, -1, places)) if len(x) else places
    run: NDArray[np.int64] = places - last_false
    return run
