"""Notes of methods as records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.errors import shortened
from rl_plugins.core.method import RowNote

Record = dict[str, Any]


def rendered(note: RowNote, count: int) -> Iterator[tuple[int, Record]]:
    """(row, text and named numbers) of each row of a note.

    Args:
        count: rows of the hook; 0 where rows are given as numbers.
    """
    rows = torch.arange(count) if note.rows is None else torch.as_tensor(note.rows).reshape(-1)
    mask = note.rows is None or rows.dtype == torch.bool
    numbers = (rows.nonzero()[:, 0] if rows.dtype == torch.bool else rows).tolist()
    for place, number in enumerate(numbers):

        def own(value: Any, i: int = number if mask else place) -> Any:
            return _plain(value[i] if _several(value) else value)

        values, named = [own(v) for v in note.values], {k: own(v) for k, v in note.named.items()}
        yield number, {"text": _filled(note.text, values, named), "values": numbers_of(named)}


def numbers_of(named: Mapping[str, Any]) -> list[Record]:
    """Those that are numbers, as of `with_names`."""
    return with_names((k, float(v)) for k, v in named.items() if isinstance(v, (bool, int, float)))


def with_names(values: Iterable[tuple[str, float]]) -> list[Record]:
    """Values with their names, as the tables have them."""
    return [{"name": name, "value": value} for name, value in values]


def written(text: str) -> str:
    """A text that a file can hold: halves of a surrogate pair are written out."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def _filled(text: str, values: Sequence[Any], named: Mapping[str, Any]) -> str:
    try:
        return written(shortened(text.format(*values, **named), 2000))
    except (IndexError, KeyError, ValueError, TypeError) as e:  # a note must not cost a batch of the trace
        return written(shortened(f"{text} ({type(e).__name__}: {e})", 2000))


def _several(value: Any) -> bool:
    return isinstance(value, (list, tuple)) or (isinstance(value, (Tensor, np.ndarray)) and bool(value.ndim))


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, (Tensor, np.generic)) else value
    return math.nan if value is None else value


__all__ = ["rendered", "with_names", "written"]
