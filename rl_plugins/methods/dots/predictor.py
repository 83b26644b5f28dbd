"""Pass rates of all prompts, predicted from those of a few by attention over embeddings (arXiv 2506.05316)."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

CHUNK = 8192  # prompts whose embeddings are looked at together


class Adapter(nn.Module):
    """What is trained on top of frozen embeddings: a projection of prompts, one of references, and a calibration.

    Args:
        size: of an embedding.
        hidden: of a projection.
        dropout: in training.
    """

    def __init__(self, size: int, hidden: int = 896, dropout: float = 0.1) -> None:
        super().__init__()
        self.size, self.hidden = size, hidden
        self.query, self.reference = _projection(size, hidden, dropout), _projection(size, hidden, dropout)
        last = nn.Linear(64, 2)
        with torch.no_grad():  # begins as no calibration: softplus(w) = 1, b = 0
            last.weight.zero_()
            last.bias.copy_(torch.tensor([float(np.log(np.e - 1)), 0.0]))
        self.calibration = nn.Sequential(nn.Linear(2, 64), nn.GELU(), last)

    def forward(self, query: Tensor, reference: Tensor, rates: Tensor, temperature: float = 1.0) -> Tensor:
        """(prompts,) predicted pass rates from the embeddings of prompts and references, as they are trained."""
        base = attention(self.query(query), self.reference(reference), temperature) @ rates
        return calibrated(base, self.calibration(spread(rates)[None])[0])


def _projection(size: int, hidden: int, dropout: float) -> nn.Sequential:
    def step() -> list[nn.Module]:
        return [nn.GELU(), nn.Dropout(dropout), nn.Linear(hidden, hidden)]

    return nn.Sequential(nn.LayerNorm(size), nn.Linear(size, hidden), *step(), *step(), nn.LayerNorm(hidden))


def attention(query: Tensor, reference: Tensor, temperature: float = 1.0) -> Tensor:
    """(prompts, references) softmax over references of z.r / sqrt(H) / temperature."""
    return torch.softmax(query @ reference.T / (query.shape[-1] ** 0.5 * temperature), -1)


def spread(rates: Tensor) -> Tensor:
    """(2,) mean and unbiased deviation of the references' pass rates, which the calibration is told."""
    return torch.stack([rates.mean(), rates.std()])


def calibrated(base: Tensor, told: Tensor) -> Tensor:
    """sigmoid(logit(base) / clip(softplus(w), 0.01, 10) + tanh(b)) with (w, b) = `told`."""
    scale = nn.functional.softplus(told[0]).clamp(1e-2, 10)
    return torch.sigmoid(torch.logit(base.clamp(1e-4, 1 - 1e-4)) / scale + torch.tanh(told[1]))


def fitted(predicted: Tensor, rates: Tensor) -> tuple[float, float]:
    """Slope and intercept of the least-squares line from predictions of the references to their pass rates; slope 0
    where all predictions are equal."""
    centered = predicted - predicted.mean()
    square = float((centered**2).sum())
    slope = float((centered * (rates - rates.mean())).sum()) / square if square > 0 else 0.0
    return slope, float(rates.mean() - slope * predicted.mean())


def selection_logits(predicted: Tensor, target: float, temperature: float) -> Tensor:
    """(prompts,) float64 unnormalized log-probabilities, -|d - target| / temperature."""
    return -(predicted.double() - target).abs() / temperature


def draw(logits: Tensor, n: int, rng: np.random.Generator) -> Tensor:
    """`n` different prompts, drawn one after the other with probability softmax(logits) among those left.

    By the Gumbel top-k trick in float64: always defined, also where all probabilities but a few underflow to 0. The
    order is that of the draw. Prompts of logit -inf come only after all others.
    """
    noise = torch.from_numpy(rng.gumbel(size=len(logits)))
    return torch.topk(logits.double() + noise, n).indices


@dataclass
class Predictor:
    """Embeddings of a dataset, with an adapter or as they are.

    Args:
        embeddings: (prompts, H), an array, possibly a memory map of a file, or a tensor. adapter: None: embeddings are
        compared unchanged, and nothing is calibrated. temperature: of the attention.
    """

    embeddings: Any
    adapter: Adapter | None = None
    temperature: float = 1.0

    def __post_init__(self) -> None:
        self._queries: Tensor | None = None
        if self.adapter is not None:
            self.adapter.eval()
            # the adapter does not change in a run, so each prompt goes through it once
            self._queries = torch.cat([self._adapted("query", part) for part in self._chunks()])

    def __len__(self) -> int:
        return len(self.embeddings)

    @torch.no_grad()
    def predict(self, references: Tensor, rates: Tensor) -> Tensor:
        """(prompts,) float64 predicted pass rates of all prompts, refitted to those of the references.

        Args:
            references: (K,) int64 prompts, at least 2.
            rates: (K,) their measured pass rates.
        """
        rates = rates.double()
        known = self._adapted("reference", self._rows(references))
        told = None if self.adapter is None else self.adapter.calibration(spread(rates).float()[None])[0].double()
        parts = []
        for part in self._chunks(self._queries):
            base = attention(part, known, self.temperature).double() @ rates
            parts.append(base if told is None else calibrated(base, told))
        predicted = torch.cat(parts)
        slope, intercept = fitted(predicted[references], rates)
        return slope * predicted + intercept

    @torch.no_grad()
    def _adapted(self, side: str, part: Tensor) -> Tensor:
        return part if self.adapter is None else getattr(self.adapter, side)(part)

    def _rows(self, rows: Tensor) -> Tensor:
        source = self.embeddings
        return torch.as_tensor(source[rows if isinstance(source, Tensor) else rows.numpy()]).float()

    def _chunks(self, source: Any = None) -> Iterator[Tensor]:
        source = self.embeddings if source is None else source
        for start in range(0, len(source), CHUNK):
            part = source[start : start + CHUNK]
            yield torch.as_tensor(part if isinstance(part, Tensor) else np.array(part)).float()
