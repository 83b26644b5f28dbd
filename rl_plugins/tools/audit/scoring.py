"""Calls the run's reward functions for an audit: many rows at a time, errors counted, every call known in number."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

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
        raised: (functions,) completions on which a function raised, those included whose message is not kept.
        scored: (functions,) completions to which a function gave a reward.
        calls: completions that were scored, by all functions together.
    """

    def __init__(self, functions: Sequence[RewardFunction], progress: Callable[[int], None] = lambda n: None) -> None:
        self.functions, self.progress = tuple(functions), progress
        self.weights = np.array([f.weight for f in functions])
        self.errors: dict[str, int] = {}
        self.raised, self.scored = (np.zeros(len(self.functions), dtype=np.int64) for _ in range(2))
        self.calls = 0

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f.name for f in self.functions)

    def score(self, rows: Sequence[Row], completions: Sequence[str], batch: int = BATCH) -> Floats:
        """(rows, functions) rewards; NaN where a function gave none or raised."""
        parts = [np.zeros((0, len(self.functions)))]
        for start in range(0, len(rows), batch):
            part_rows, part = rows[start : start + batch], completions[start : start + batch]
            with _exits_raise():
                parts.append(np.stack([self._one(k, part_rows, part) for k in range(len(self.functions))], axis=1))
            self.scored += (~np.isnan(parts[-1])).sum(axis=0)
            self.progress(len(part))
        return np.concatenate(parts)

    def total(self, rewards: Floats) -> Floats:
        """(rows,) weighted sum over the functions that scored; NaN where none did."""
        return np.where(np.isnan(rewards).all(axis=1), np.nan, np.nansum(rewards * self.weights, axis=1))

    def _one(self, k: int, rows: Sequence[Row], completions: Sequence[str]) -> Floats:
        function = self.functions[k]
        self.calls += len(rows)
        try:
            return np.array([np.nan if r is None else r for r in function.call(rows, completions)], dtype=np.float64)
        except (Exception, SystemExit) as e:
            if len(rows) > 1:  # which row it was
                pairs = zip(rows, completions, strict=True)
                return np.concatenate([self._one(k, [row], [text]) for row, text in pairs])
            self.raised[k] += 1
            message = f"{function.name}: {type(e).__name__}: {shortened(e, 200)}"
            if message in self.errors or len(self.errors) < _ERRORS:
                self.errors[message] = self.errors.get(message, 0) + 1
            return np.array([np.nan])


@contextmanager
def _exits_raise() -> Iterator[None]:
    """`os._exit` of this process raises, so that a reward function cannot end an audit with status 0. A process that
    the function forks still ends by it."""
    really, own = os._exit, os.getpid()

    def refused(status: int) -> None:
        if os.getpid() != own:
            really(status)
        raise SystemExit(f"os._exit({status})")

    os._exit = refused  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = really
