"""The quality head: numbers that describe the start of a rollout, a small network on them, and its calibration."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

_LOWEST = -20.0  # log-probs below count as this
_CERTAIN = math.log(0.9)  # a token at least this likely was certain
_SMALL = 1e-6  # a feature that varies less than this is left as it is


def features_of(
    logprobs: Sequence[float], top: Sequence[Sequence[tuple[int, float]]], limit: int, with_top: bool
) -> list[float]:
    """Features of the first `limit` tokens of a rollout: mean, deviation and minimum of the log-probs, mean of the
    lowest tenth, share of certain tokens (p >= 0.9), mean of the last quarter minus that of all, length / limit. With
    `with_top` also mean and maximum of the entropy of the reported tokens (renormalized, nats) and the mean gap between
    the first two.

    Args:
        logprobs: of the sampled tokens.
        top: of each token the most likely ones with their log-probs, see `rl_plugins.core.requests.Generated`.
    """
    n = min(len(logprobs), limit)
    if not n:
        return [0.0] * (10 if with_top else 7)
    x = np.clip(np.nan_to_num(np.asarray(logprobs[:n], dtype=float), nan=0.0), _LOWEST, 0.0)
    lowest, last = np.sort(x)[: max(1, n // 10)], x[-max(1, n // 4) :]
    found = [x.mean(), x.std(), x.min(), lowest.mean(), (x >= _CERTAIN).mean(), last.mean() - x.mean(), n / limit]
    if with_top:
        k = max([2, *(len(t) for t in top[:n])])
        each = np.array(
            [[p for _, p in t] + [-np.inf] * (k - len(t)) for t in top[:n]] or [[0.0] + [-np.inf] * (k - 1)]
        )
        each = np.clip(each, 5 * _LOWEST, 0.0)
        p = np.exp(each) / np.exp(each).sum(1, keepdims=True)
        entropy = -(p * np.log(np.maximum(p, 1e-30))).sum(1)
        gap = np.minimum(each[:, 0] - each[:, 1], -_LOWEST)
        found += [entropy.mean(), entropy.max(), gap.mean()]
    return [float(v) for v in found]


def with_prompt(features: Sequence[Sequence[float]]) -> list[list[float]]:
    """Appends to every rollout's features their mean over the prompt's rollouts, which tells how hard the prompt is."""
    x = np.asarray(features, dtype=float)
    return np.hstack([x, np.broadcast_to(x.mean(0), x.shape)]).tolist()  # type: ignore[no-any-return]


def quality(head: Mapping[str, Any], features: Any) -> Tensor:
    """q of each rollout, (rows,) float64 in (0, 1).

    Args:
        head: of the state or the payload: tensors or lists.
        features: (rows, features).
    """
    return torch.sigmoid(_logit({k: _double(v) for k, v in head.items()}, _double(features)))


def fit(
    head: Mapping[str, Tensor] | None,
    moments: Mapping[str, Mapping[str, Tensor]] | None,
    features: Tensor,
    labels: Tensor,
    weights: Tensor,
    *,
    width: int,
    steps: int,
    learning_rate: float,
    rng: np.random.Generator,
) -> tuple[dict[str, Tensor], dict[str, dict[str, Tensor]]]:
    """The head after `steps` passes of AdamW over all rows, from where both stood, and the optimizer's moments of each
    weight. Weighted binary cross-entropy; features are standardized by their own mean and deviation.

    Args:
        head, moments: what the last call returned; None: new weights, an optimizer that has seen nothing.
        features: (rows, features) float64.
        labels, weights: (rows,) float64.
    """
    size = features.shape[1]
    if head is None:
        head = {
            "w1": torch.from_numpy(rng.normal(size=(size, width)) / math.sqrt(size)),
            "b1": torch.zeros(width, dtype=torch.float64),
            "w2": torch.from_numpy(rng.normal(size=width) / math.sqrt(width)),
            "b2": torch.zeros((), dtype=torch.float64),
        }
    spread = features.std(0, correction=0)
    scaling = {"mean": features.mean(0), "scale": torch.where(spread > _SMALL, spread, 1.0)}
    with torch.enable_grad():
        trained = {k: head[k].detach().clone().requires_grad_() for k in ("w1", "b1", "w2", "b2")}
        optimizer = torch.optim.AdamW(trained.values(), lr=learning_rate)
        for name, known in (moments or {}).items():
            optimizer.state[trained[name]] = {k: v.clone() for k, v in known.items()}
        for _ in range(steps):
            optimizer.zero_grad()
            logits = _logit({**trained, **scaling}, features)
            loss = F.binary_cross_entropy_with_logits(logits, labels, weights, reduction="sum") / weights.sum()
            torch.autograd.backward(loss)
            optimizer.step()
    return {**{k: v.detach() for k, v in trained.items()}, **scaling}, {
        name: dict(optimizer.state[weight]) for name, weight in trained.items()
    }


@dataclass(frozen=True)
class Calibrator:
    """The paper's posterior of being right given the bin of q: `pi P(b|1) / (pi P(b|1) + (1 - pi) P(b|0))`, with
    `P(b|y) = (count of b among y + 1) / (count of y + bins)` and pi the share of right ones.

    Args:
        rates: (bins,) of each of as many equal parts of [0, 1].
    """

    rates: Sequence[float]

    @classmethod
    def fitted(cls, scores: Tensor, labels: Tensor, weights: Tensor, bins: int) -> Calibrator:
        """From (rows,) float64 each; every row counts with its weight."""
        place = _bin(scores, bins)
        right = torch.bincount(place, weights * labels, minlength=bins)
        wrong = torch.bincount(place, weights * (1 - labels), minlength=bins)
        prior = right.sum() / (right.sum() + wrong.sum())
        of_right = prior * (right + 1) / (right.sum() + bins)
        of_wrong = (1 - prior) * (wrong + 1) / (wrong.sum() + bins)
        return cls((of_right / (of_right + of_wrong)).tolist())

    def __call__(self, scores: Any) -> Tensor:
        return _double(self.rates)[_bin(_double(scores), len(self.rates))]


def _logit(head: Mapping[str, Tensor], x: Tensor) -> Tensor:
    hidden = F.gelu((x - head["mean"]) / head["scale"] @ head["w1"] + head["b1"])
    return hidden @ head["w2"] + head["b2"]


def _bin(scores: Tensor, bins: int) -> Tensor:
    return (scores * bins).long().clamp(0, bins - 1)


def _double(value: Any) -> Tensor:
    return torch.as_tensor(value, dtype=torch.float64)
