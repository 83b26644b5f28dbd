"""What a hook is given, watched: whether it changed any of it in place.

torch counts the writes to a tensor itself. Writes that it does not see (through numpy) show in the bytes of tensors on
the CPU, of large ones in a sample; those to lists and dicts, however deep, in the objects that they hold. Texts and
numbers cannot be changed, so they are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

SAMPLE = 1 << 14  # bytes of a tensor that are compared
_LEAVES = (str, bytes, int, float, complex, bool, type(None))

Watched = list[tuple[str, Callable[[], Any], Any]]
"""For everything that could be changed: its name, how to look at it, and what it looked like."""


def watched(args: tuple[Any, ...]) -> Watched:
    """Everything in the arguments of a hook that could be changed, as it is now."""
    seen: set[int] = set()
    looks = [look for value in args for look in _looks(value, type(value).__name__, seen)]
    return [(name, look, look()) for name, look in looks]


def changes(before: Watched) -> list[str]:
    """Names of what is not as it was."""
    return list(dict.fromkeys(f"`{name}`" for name, look, was in before if look() != was))


def _looks(value: Any, name: str, seen: set[int]) -> Iterator[tuple[str, Callable[[], Any]]]:
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        yield name, lambda: _of_tensor(value)
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        yield name, lambda: value.tobytes() if value.nbytes <= SAMPLE else value.ravel()[: SAMPLE // 8].tobytes()
    elif isinstance(value, Mapping):
        if isinstance(value, dict):
            yield name, lambda: [(k, _Same(v)) for k, v in value.items()]
        for k, v in value.items():
            yield from _looks(v, f"{name}[{k!r}]" if isinstance(k, str) else name, seen)
    elif isinstance(value, (list, tuple)):
        if isinstance(value, list):
            yield name, lambda: [_Same(v) for v in value]
        for v in value:
            yield from _looks(v, name, seen)
    elif is_dataclass(value) and not isinstance(value, type):
        for f in fields(value):
            if f.name == "dataset":  # it may have a million rows
                continue
            yield from _looks(getattr(value, f.name), f"{type(value).__name__}.{f.name}", seen)


class _Same:
    """An object that is equal to itself alone; kept, so that no other takes its place in memory."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.value is other.value

    __hash__ = None  # type: ignore[assignment]


def _of_tensor(x: Tensor) -> Any:
    version = None if x.is_inference() else x._version
    if x.device.type != "cpu" or not x.numel() or x.layout != torch.strided:
        return version
    flat = x.detach().reshape(-1)
    step = max(1, flat.numel() * flat.element_size() // SAMPLE)
    return version, flat[::step].contiguous().view(torch.uint8).numpy().tobytes()
