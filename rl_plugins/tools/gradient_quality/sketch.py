"""Score functions of rollouts as sketches: D numbers for a gradient, whose inner products are about the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

NUMBERS = 1 << 26  # of gradients that are held at once


class CountSketch:
    """Adds each of many numbers, with a random sign, to one of `dims` places.

    Inner products of sketches are those of the vectors on average, with a standard deviation of at most
    sqrt(2 / dims) |a| |b|. Signs and places follow from the seed.

    Args:
        size: of the vectors. dims: D.
    """

    def __init__(self, size: int, dims: int, seed: int = 0) -> None:
        stream = torch.Generator().manual_seed(seed)
        self.size, self.dims = size, dims
        place = torch.randint(dims, (size,), generator=stream, dtype=torch.int32)
        positive = torch.randint(2, (size,), generator=stream, dtype=torch.int8)
        self._place = place + dims * (1 - positive.int())  # those with a minus come behind the others

    def __call__(self, vectors: Tensor, first: int = 0) -> Tensor:
        """Numbers `first` and following of vectors, (..., n), the others being 0 -> (..., dims), float32."""
        flat = vectors.float().reshape(-1, vectors.shape[-1]).cpu()
        place = self._place[first : first + flat.shape[1]].long()
        both = torch.zeros(len(flat), 2 * self.dims).scatter_add_(1, place.expand_as(flat), flat)
        return (both[:, : self.dims] - both[:, self.dims :]).reshape(*vectors.shape[:-1], self.dims)


def score_sketches(
    model: Any,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Sequence[int]],
    dims: int,
    seed: int = 0,
    temperature: float = 1.0,
    batch: int = 1,
) -> Tensor:
    """(rows, dims) sketched gradient of the log-prob of each completion in the parameters that require one.

    Equal rows are computed once. A batch of rows takes one backward pass, by the rule that the gradient of a row in the
    parameters of a layer follows from the row's input of the layer and from the gradient of its output. Where a layer
    is not of this kind (its rows are mixed, or its parameters are read elsewhere), a row takes a pass of its own.
    The model stays as it is.

    Args:
        model: a causal language model of transformers, in evaluation mode.
        prompts, completions: token ids of each row, without padding.
        temperature: that logits are divided by.
        batch: rows at a time.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    sketch = CountSketch(sum(p.numel() for p in parameters), dims, seed)
    rows = [(tuple(p), tuple(c)) for p, c in zip(prompts, completions, strict=True)]
    made: dict[tuple[tuple[int, ...], tuple[int, ...]], Tensor] = {}
    different = sorted(dict.fromkeys(rows), key=lambda row: len(row[0]) + len(row[1]))
    for begin in range(0, len(different), batch):
        part = different[begin : begin + batch]
        found = _together(model, part, temperature, sketch) if len(part) > 1 else None
        if found is None:
            found = torch.stack([_alone(model, row, temperature, sketch) for row in part])
        made.update(zip(part, found, strict=True))
    return torch.stack([made[row] for row in rows])


def _logprob(model: Any, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], temperature: float) -> Tensor:
    """Sum of the log-probs of all completions."""
    device = next(model.parameters()).device
    ids = pad_sequence([torch.tensor(p + c) for p, c in rows], batch_first=True).to(device)
    length = torch.tensor([len(p) + len(c) for p, c in rows], device=device)[:, None]
    begin = torch.tensor([len(p) for p, _ in rows], device=device)[:, None]
    keep = ids.shape[1] - int(begin.min()) + 1
    place = torch.arange(ids.shape[1], device=device)
    logits = model(ids, attention_mask=(place < length).long(), logits_to_keep=keep).logits[:, -keep:-1]
    logprobs = (logits.float() / temperature).log_softmax(-1).gather(2, ids[:, 1 - keep :, None])[..., 0]
    place = place[1 - keep :]
    return (logprobs * ((place >= begin) & (place < length))).sum()


def _alone(model: Any, row: tuple[tuple[int, ...], tuple[int, ...]], temperature: float, sketch: CountSketch) -> Tensor:
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = torch.autograd.grad(_logprob(model, [row], temperature), parameters, allow_unused=True)
    made, first = torch.zeros(sketch.dims), 0
    for p, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            made += sketch(gradient.reshape(-1), first)
        first += p.numel()
    return made


def _together(
    model: Any, rows: Sequence[tuple[tuple[int, ...], tuple[int, ...]]], temperature: float, sketch: CountSketch
) -> Tensor | None:
    """The sketches of several rows; None where they cannot be told apart."""
    first, offset = {}, 0
    for p in model.parameters():
        if p.requires_grad:
            first[id(p)], offset = offset, offset + p.numel()
    layers = [m for m in model.modules() if any(id(p) in first for p in m.parameters(recurse=False))]
    seen: list[tuple[nn.Module, Any, Any]] = []

    def note(layer: nn.Module, given: Any, made: Any) -> None:
        seen.append((layer, given, made))

    hooks = [layer.register_forward_hook(note) for layer in layers]
    try:
        logprob = _logprob(model, rows, temperature)
    finally:
        for hook in hooks:
            hook.remove()
    known = {id(p) for m, _, _ in seen for p in m.parameters(recurse=False)}
    if not (first.keys() <= known and all(_by_rows(x, len(rows)) and _by_rows((y,), len(rows)) for _, x, y in seen)):
        return None
    gradients = torch.autograd.grad(logprob, [y for _, _, y in seen], allow_unused=True)
    made = torch.zeros(len(rows), sketch.dims)
    for (layer, (given,), _), gradient in zip(seen, gradients, strict=True):
        if gradient is None:
            continue
        own = {n: p for n, p in layer.named_parameters(recurse=False) if id(p) in first}
        step = max(1, NUMBERS // sum(p.numel() for p in own.values()))
        for begin in range(0, len(rows), step):
            part = slice(begin, begin + step)
            for name, found in _of_parameters(layer, own, given.detach()[part], gradient[part]).items():
                made[part] += sketch(found.flatten(1), first[id(own[name])])
    return made


def _by_rows(values: tuple[Any, ...], rows: int) -> bool:
    return len(values) == 1 and isinstance(values[0], Tensor) and values[0].ndim > 1 and len(values[0]) == rows


def _of_parameters(layer: nn.Module, own: dict[str, Any], given: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    """Name -> (rows, *shape) gradient of each row in the parameters of a layer.

    Args:
        given: (rows, ...) input. gradient: (rows, ...) of the output.
    """
    values = {name: p.detach() for name, p in own.items()}

    def one(x: Tensor, g: Tensor) -> Any:
        pull = torch.func.vjp(lambda v: torch.func.functional_call(layer, v, (x,)), values)[1]
        return pull(g)[0]

    found: dict[str, Tensor] = torch.func.vmap(one)(given, gradient)
    return found
