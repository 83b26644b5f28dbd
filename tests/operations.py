"""Counts instead of seconds: bytecode instructions the package executes, bytes its arrays copy and torch allocates."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import rl_plugins

PACKAGE = str(Path(rl_plugins.__file__).parent)


def instructions(work: Callable[[], Any]) -> int:
    """Bytecode instructions executed in files of the package while `work` runs in this thread."""
    count = 0

    def trace(frame: Any, event: str, arg: Any) -> Any:
        nonlocal count
        if event == "call":
            if not frame.f_code.co_filename.startswith(PACKAGE):
                return None
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
        elif event == "opcode":
            count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


class CountingArray(array):
    """An `array` that counts the entries that are copied into it, out of it and within it."""

    copied = 0

    def extend(self, values: Any) -> None:
        CountingArray.copied += len(values)
        super().extend(values)

    def tolist(self) -> Any:
        CountingArray.copied += len(self)
        return super().tolist()

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        if isinstance(place, slice):
            CountingArray.copied += len(found)
            return CountingArray(self.typecode, found)
        return found


def exponent(small: float, large: float, factor: float) -> float:
    """k of growth like size^k, where the size grew by `factor`."""
    return math.log(large / small) / math.log(factor)


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that torch's operations make while it is entered; views of what is there are none."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        known = {x.untyped_storage().data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        out = function(*args, **kwargs)
        for x in tree_leaves(out):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in known:
                self.bytes += x.numel() * x.element_size()
        return out


def allocated(work: Callable[[], Any]) -> int:
    with Allocated() as count:
        work()
    return count.bytes
