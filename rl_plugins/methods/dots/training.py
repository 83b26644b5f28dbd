"""Training the adapter from measured pass rates (arXiv 2506.05316), once, before any run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from rl_plugins.methods.dots.predictor import Adapter


def train_adapter(
    embeddings: Any,
    tables: Mapping[str, tuple[Tensor, Tensor]],
    *,
    references: int = 256,
    epochs: int = 20,
    lr: float = 1e-3,
    hidden: int = 896,
    batch: int = 256,
    seed: int = 0,
    progress: Callable[[float], None] = lambda loss: None,
) -> tuple[Adapter, float]:
    """An adapter that predicts pass rates of prompts from those of random references of the same model.

    In each step, for one of the models: `references` random prompts are the references, a batch of others is predicted
    from them, and the loss is the binary cross-entropy with the measured rates.

    Args:
        embeddings: (prompts, H).
        tables: model -> (prompts (n,) int64, their pass rates (n,) in [0, 1]).
        progress: is told the loss of every step.

    Returns:
        The adapter and the mean loss of the last epoch.
    """
    torch.manual_seed(seed)  # of a program of its own
    generator = torch.Generator().manual_seed(seed)
    adapter = Adapter(int(embeddings.shape[1]), hidden)
    optimizer, losses = torch.optim.Adam(adapter.parameters(), lr), [0.0]
    adapter.train()
    for _ in range(epochs):
        losses = []
        for prompts, rates in tables.values():
            k = min(references, len(prompts) - 1)
            size = min(batch, max(1, len(prompts) // 2))
            for part in torch.split(torch.randperm(len(prompts), generator=generator), size):
                rest = torch.ones(len(prompts), dtype=torch.bool)
                rest[part] = False
                others = rest.nonzero()[:, 0]
                if len(others) < 2:
                    continue
                known = others[torch.randperm(len(others), generator=generator)[:k]]
                query, reference = (_rows(embeddings, prompts[i]) for i in (part, known))
                predicted = adapter(query, reference, rates[known].float())
                loss = torch.nn.functional.binary_cross_entropy(predicted.clamp(1e-6, 1 - 1e-6), rates[part].float())
                optimizer.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimizer.step()
                losses.append(float(loss.detach()))
                progress(losses[-1])
    adapter.eval()
    return adapter, sum(losses) / max(1, len(losses))


def steps_of(tables: Mapping[str, tuple[Tensor, Tensor]], epochs: int, batch: int = 256) -> int:
    """Optimizer steps that `train_adapter` makes."""
    sizes = [len(prompts) for prompts, _ in tables.values()]
    return epochs * sum(-(-n // min(batch, max(1, n // 2))) for n in sizes)


def _rows(embeddings: Any, rows: Tensor) -> Tensor:
    return torch.as_tensor(embeddings[rows if isinstance(embeddings, Tensor) else rows.numpy()]).float()
