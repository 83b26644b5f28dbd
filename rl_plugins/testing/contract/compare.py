"""Copies, comparisons and fingerprints: what changed, and by how much."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

RTOL, ATOL = 1e-5, 1e-6


def copy_of(value: Any) -> Any:
    """A copy of plain data and of records; other objects as they are."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return value.copy()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.replace(
            value, **{f.name: copy_of(getattr(value, f.name)) for f in dataclasses.fields(value)}
        )
    if isinstance(value, Mapping):
        return {k: copy_of(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([copy_of(v) for v in value])
    return value


def differences(a: Any, b: Any, close: bool = False, path: str = "") -> list[str]:
    """Where two values differ: names of fields joined by dots. NaN equals NaN; a list equals a tuple.

    Args:
        close: numbers need only agree to rounding.
    """
    here = [path or "value"]
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        a, b = torch.from_numpy(a), torch.from_numpy(b)
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        if a.shape != b.shape or a.dtype != b.dtype:
            return here
        if close and a.is_floating_point():
            same = torch.allclose(a, b, RTOL, ATOL, equal_nan=True)
        else:
            same = bool(((a == b) | ((a != a) & (b != b))).all())
        return [] if same else here
    if dataclasses.is_dataclass(a) and not isinstance(a, type) and type(a) is type(b):
        names = [f.name for f in dataclasses.fields(a)]
        pairs = {name: (getattr(a, name), getattr(b, name)) for name in names}
    elif isinstance(a, Mapping) and isinstance(b, Mapping):
        if a.keys() != b.keys():
            return here
        pairs = {str(k): (a[k], b[k]) for k in a}
    elif isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        if len(a) != len(b):
            return here
        pairs = {str(i): pair for i, pair in enumerate(zip(a, b, strict=True))}
    elif isinstance(a, float) and isinstance(b, float):
        same = a == b or (a != a and b != b) or (close and abs(a - b) <= ATOL + RTOL * abs(b))
        return [] if same else here
    else:
        try:
            return [] if a is b or (type(a) is type(b) and bool(a == b)) else here
        except Exception:  # objects that cannot be compared
            return []
    return [p for name, pair in pairs.items() for p in differences(*pair, close, f"{path}.{name}" if path else name)]
