"""Score functions of rollouts as sketches: D numbers for a gradient, whose inner products are about the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


class CountSketch:
    """Adds each of many numbers, with a random sign, to one of `dims` places.

    Inner products of sketches are those of the vectors on average, with a standard deviation of at most
    sqrt(2 / dims) |a| |b|. Signs and places follow from the seed.

    Args:
        size: of the vectors. dims: D.
    """

    def __init__(self, size: int, dims: int, seed: int = 0) -> None:
        stream = torch.Generator().manual_seed(seed)
        self.dims = dims
        self._place = torch.randint(dims, (size,), generator=stream)
        self._sign = torch.randint(2, (size,), generator=stream).float() * 2 - 1

    def __call__(self, vector: Tensor) -> Tensor:
        """(size,) -> (dims,), float32."""
        return torch.zeros(self.dims).index_add_(0, self._place, vector.float() * self._sign)


def score_sketches(
    model: Any, prompts: Sequence[Sequence[int]], completions: Sequence[Sequence[int]], dims: int, seed: int = 0
) -> Tensor:
    """(rows, dims) sketched gradient of the log-prob of each completion in the parameters that require one.

    A row takes a backward pass, and equal rows take one together. The model stays as it is.

    Args:
        model: a causal language model of transformers, in float32, in evaluation mode.
        prompts, completions: token ids of each row, without padding.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    sketch = CountSketch(sum(p.numel() for p in parameters), dims, seed)
    made: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
    rows = [(tuple(p), tuple(c)) for p, c in zip(prompts, completions, strict=True)]
    for prompt, completion in dict.fromkeys(rows):
        ids = torch.tensor([prompt + completion])
        logits = model(ids).logits[0, len(prompt) - 1 : -1]
        logprob = logits.log_softmax(-1).gather(1, torch.tensor(completion)[:, None]).sum()
        gradients = torch.autograd.grad(logprob, parameters, allow_unused=True)
        flat = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        made[prompt, completion] = sketch(torch.cat([g.reshape(-1) for g in flat]))
    return torch.stack([made[row] for row in rows])
