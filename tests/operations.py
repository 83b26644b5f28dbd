"""Counts instead of seconds: bytecode instructions the package executes, and bytes its arrays copy."""

from __future__ import annotations

import math
import sys
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
