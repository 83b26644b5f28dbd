"""Values that methods log, combined over micro-batches and ranks exactly as they ask (mean, sum, min, max)."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from rl_plugins.core.errors import MethodError

# name -> (reduce, accumulated value, accumulated weight); what ranks exchange.
Partial = dict[str, tuple[str, float, float]]


class Metrics:
    """Collects values of one step. Tensors are read when the step is over, all at once, so logging in the loss costs no
    sync."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[str, list[tuple[Any, Any]]]] = {}

    def add(self, name: str, value: Any, reduce: str, weight: Any = 1.0) -> None:
        if reduce not in ("mean", "sum", "min", "max"):
            raise MethodError(f"`{name}` is logged with reduce={reduce!r}; allowed: mean, sum, min, max.")
        known, values = self._values.setdefault(name, (reduce, []))
        if known != reduce:
            raise MethodError(f"`{name}` is logged with reduce={reduce!r} and {known!r} in one step; use one of them.")
        values.append((_number(name, value), _number(name, weight)))

    def take(self) -> Partial:
        """What was collected, as plain numbers; the collection is empty afterwards. NaN values are left out."""
        partial = self.look()
        self._values.clear()
        return partial

    def look(self) -> Partial:
        """Like `take`, and the collection stays."""
        partial: Partial = {}
        numbers_of = iter(_read([x for _, values in self._values.values() for pair in values for x in pair]))
        for name, (reduce, values) in self._values.items():
            pairs = [(next(numbers_of), next(numbers_of)) for _ in values]
            numbers = [(v, w) for v, w in pairs if not math.isnan(v) and 0 < w < math.inf]
            if not numbers:
                partial[name] = (reduce, 0.0, 0.0)
            elif reduce == "mean":
                partial[name] = (reduce, _sum(v * w for v, w in numbers), _sum(w for _, w in numbers))
            elif reduce == "sum":
                partial[name] = (reduce, _sum(v for v, _ in numbers), 1.0)
            else:
                partial[name] = (reduce, (min if reduce == "min" else max)(v for v, _ in numbers), 1.0)
        return partial


def combine(partials: Iterable[Partial]) -> dict[str, float]:
    """The values of all ranks as one number per name; names without a value are left out."""
    merged: dict[str, tuple[str, list[tuple[float, float]]]] = {}
    for partial in partials:
        for name, (reduce, value, weight) in partial.items():
            known, values = merged.setdefault(name, (reduce, []))
            if known != reduce:
                raise MethodError(f"`{name}` is logged with reduce={reduce!r} and {known!r} on two ranks; use one.")
            if weight > 0:
                values.append((value, weight))
    out = {}
    for name, (reduce, values) in merged.items():
        if not values:
            continue
        if reduce == "mean":
            out[name] = _sum(v for v, _ in values) / _sum(w for _, w in values)
        elif reduce == "sum":
            out[name] = _sum(v for v, _ in values)
        else:
            out[name] = (min if reduce == "min" else max)(v for v, _ in values)
    return out


def _number(name: str, value: Any) -> Any:
    """A float, or a tensor of one element that is read later."""
    if not hasattr(value, "detach"):
        return float(value)
    if value.numel() != 1:
        raise MethodError(f"`{name}` is logged with a tensor of shape {tuple(value.shape)}; log one number.")
    if value.is_complex():
        raise MethodError(f"`{name}` is logged with a complex number; log a real one.")
    return value.detach()


def _read(values: list[Any]) -> list[float]:
    """Values as floats. The tensors of one device and type are read at once, each exactly as it is."""
    kinds: dict[Any, list[int]] = {}
    for i, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            kinds.setdefault((value.device, value.dtype), []).append(i)
    for places in kinds.values():
        numbers = torch.stack([values[i].reshape(()) for i in places]).tolist()
        for i, number in zip(places, numbers, strict=True):
            values[i] = float(number)
    return values


def _sum(values: Iterable[float]) -> float:
    """Does not depend on the order, so neither on how rows were split; infinities add up as usual."""
    numbers = list(values)
    try:
        return math.fsum(numbers)
    except (OverflowError, ValueError):  # beyond the largest float, or inf - inf
        return sum(numbers)
