"""Calls the run's reward functions for an audit: many rows at a time, errors counted, every call known in number."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rl_plugins.core.errors import shortened
from rl_plugins.core.rollouts import RewardFunction
from rl_plugins.tools.audit.rows import Row

Floats = NDArray[np.float64]
BATCH = 64
_ERRORS = 20  # messages that are kept


class RewardCaller:
    """The reward functions that can be called here.

    Args:
        functions: at least one.
        progress: called with the number of completions that were scored.

    Attributes:
        errors: message of an exception -> how often it was raised. The reward of such a row is NaN.
        calls: completions that were scored, by all functions together.
    """

    def __init__(self, functions: Sequence[RewardFunction], progress: Callable[[int], None] = lambda n: None) -> None:
        self.functions, self.progress = tuple(functions), progress
        self.weights = np.array([f.weight for f in functions])
        self.errors: dict[str, int] = {}
        self.calls = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.functions)

    def score(self, rows: Sequence[Row], completions: Sequence[str], batch: int = BATCH) -> Floats:
        """(rows, functions) rewards; NaN where a function gave none or raised."""
        parts = [np.zeros((0, len(self.functions)))]
        for start in range(0, len(rows), batch):
            part_rows, part = rows[start : start + batch], completions[start : start + batch]
            parts.append(np.stack([self._one(f, part_rows, part) for f in self.functions], axis=1))
            self.progress(len(part))
        return np.concatenate(parts)

    def total(self, rewards: Floats) -> Floats:
        """(rows,) weighted sum over the functions that scored; NaN where none did."""
        return np.where(np.isnan(rewards).all(axis=1), np.nan, np.nansum(rewards * self.weights, axis=1))

    def _one(self, function: RewardFunction, rows: Sequence[Row], completions: Sequence[str]) -> Floats:
        self.calls += len(rows)
        try:
            return np.array([np.nan if r is None else r for r in function.call(rows, completions)], dtype=np.float64)
        except Exception as e:
            if len(rows) > 1:  # which row it was
                pairs = zip(rows, completions, strict=True)
                return np.concatenate([self._one(function, [row], [text]) for row, text in pairs])
            message = f"{function.name}: {type(e).__name__}: {shortened(e, 200)}"
            if message in self.errors or len(self.errors) < _ERRORS:
                self.errors[message] = self.errors.get(message, 0) + 1
            return np.array([np.nan])
