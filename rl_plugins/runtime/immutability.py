"""What a hook is given and the global random generators, watched: whether it changed any of it in place.

Only the contract test (`rl-plugins check`) looks, and a run with RL_PLUGINS_DEBUG=1 in its environment. Every other run
looks at nothing, so a hook costs the same whatever it is given.

A look compares a checksum of every storage, once however many tensors share it; what lies on a GPU is copied for it. Of
lists and dicts, however deep, it compares the objects that they hold. Texts and numbers cannot be changed, so they are
not read.
"""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

VARIABLE = "RL_PLUGINS_DEBUG"
_CHECKING: ContextVar[bool] = ContextVar("checking", default=False)
_LEAVES = (str, bytes, int, float, complex, bool, type(None))

Watched = list[tuple[str, Callable[[], Any], Any]]
"""For everything that could be changed: its name, how to look at it, and what it looked like."""


@contextmanager
def checking() -> Iterator[None]:
    """Inside of it every hook is watched."""
    token = _CHECKING.set(True)
    try:
        yield
    finally:
        _CHECKING.reset(token)


def is_watching() -> bool:
    """Whether hooks are watched now."""
    return _CHECKING.get() or os.environ.get(VARIABLE, "") not in ("", "0")


def watched(args: tuple[Any, ...]) -> Watched:
    """Everything in the arguments of a hook that could be changed, as it is now; nothing where nobody watches."""
    if not is_watching():
        return []
    seen: set[Any] = set()
    looks = [look for value in args for look in _looks(value, type(value).__name__, seen)]
    return [(name, look, look()) for name, look in looks]


def changes(before: Watched) -> list[str]:
    """Names of what is not as it was."""
    return list(dict.fromkeys(f"`{name}`" for name, look, was in before if look() != was))


def global_generators() -> dict[str, Any]:
    """The states of the global random generators, by library; none where nobody watches."""
    if not is_watching():
        return {}
    name, keys, *rest = np.random.get_state()
    found = {
        "torch": torch.get_rng_state().numpy().tobytes(),
        "numpy": (name, np.asarray(keys).tobytes(), *rest),
        "random": random.getstate(),
    }
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        found["torch.cuda"] = [state.numpy().tobytes() for state in torch.cuda.get_rng_state_all()]
    return found


def drawn_from(before: dict[str, Any]) -> list[str]:
    """Libraries whose global random generator is no longer as it was. A hook that draws from one makes other numbers
    after a resume, on another host or beside another method."""
    return [library for library, state in global_generators().items() if before.get(library, state) != state]


def _looks(value: Any, name: str, seen: set[Any]) -> Iterator[tuple[str, Callable[[], Any]]]:
    if isinstance(value, _LEAVES) or id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, Tensor):
        if not value.is_inference():
            yield name, lambda: value._version
        storage = value.untyped_storage() if value.device.type != "meta" and value.layout == torch.strided else None
        if storage and (place := ("storage", value.device, storage.data_ptr())) not in seen:
            seen.add(place)
            whole = torch.empty(0, dtype=torch.uint8, device=value.device).set_(storage)
            yield name, lambda: zlib.crc32(whole.cpu().numpy().data)
    elif type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        yield name, lambda: zlib.crc32(value.tobytes())
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
