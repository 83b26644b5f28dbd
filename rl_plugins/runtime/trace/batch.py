"""A traced batch: what the driver hooks saw and returned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.method import RowNote, TurnNote
from rl_plugins.core.rollouts import PlanRow, Rollouts, RowRatio, Shape, Tokens


@dataclass(frozen=True)
class Seen:
    """One driver hook of one method: what it returned, and what it noted."""

    hook: str
    method: str
    args: tuple[Any, ...]
    result: Any
    notes: Sequence[RowNote | TurnNote]


@dataclass(frozen=True)
class TracedBatch:
    """A batch as the driver left it.

    Args:
        rollouts, tokens: of all rows, and of those that `select` left, after every hook.
        seen: hooks of this batch in their order.
        plans: group -> (plan row, methods that changed it).
        selected: (method, dataset rows) of `select_prompts`.
        prompts: notes of prompts, as records.
        groups: numbers of the groups to record.
        stats: logged by the last updates.
    """

    rollouts: Rollouts
    tokens: Tokens
    seen: Sequence[Seen]
    plans: Mapping[int, tuple[PlanRow, tuple[str, ...]]]
    selected: tuple[str, tuple[int, ...]]
    prompts: Sequence[Mapping[str, Any]]
    groups: frozenset[int]
    stats: Mapping[str, float]


@dataclass(frozen=True)
class Updated:
    """One optimizer step.

    Args:
        scaled: method -> factor on the learning rate; None: the host does not say it.
        stats: logged by the methods in this step.
        ratios: of the recorded rows.
    """

    scaled: Mapping[str, float] | None
    stats: Mapping[str, float]
    ratios: Sequence[RowRatio] = ()

    def without_ratios(self) -> Updated:
        return Updated(self.scaled, self.stats)


def shapes(batch: TracedBatch) -> list[tuple[str, Shape]]:
    """(method, what it returned) of every `shape` hook that changed something."""
    return [(s.method, s.result) for s in batch.seen if s.hook == "shape" and isinstance(s.result, Shape)]


def first_advantages(batch: TracedBatch) -> Tensor:
    """(tokens,) before the first `shape` hook that changed advantages; those of the end if none did."""
    for s in batch.seen:
        if s.hook == "shape" and isinstance(s.result, Shape) and shaped_advantages(s) is not None:
            before: Tensor = _given(s).advantages
            return before
    return batch.tokens.advantages


def shaped_advantages(s: Seen) -> Tensor | None:
    """(tokens,) after a `shape` hook; None if it changed none."""
    made, factor = s.result.advantages, s.result.row_factor
    if factor is None:
        return None if made is None else torch.as_tensor(made)
    made = _given(s).advantages if made is None else torch.as_tensor(made)
    return made * torch.as_tensor(factor)[_given(s).row]


def _given(s: Seen) -> Tokens:
    """The tokens of a `shape` hook, whether it asked for them or not."""
    tokens: Tokens = getattr(s.args[1], "hidden", s.args[1])
    return tokens
