"""What the hooks `advantages`, `policy_loss` and `regularize` return, looked at on every call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import Rollouts, Terms


def wrong_result(method: type[Method], hook: str, args: tuple[Any, ...], result: Any) -> Iterator[str]:
    """What is wrong with what a hook of this class returns for these arguments."""
    if hook == "advantages" and isinstance(result, Tensor):
        yield from _wrong_advantages(method, args[0], result)
    if hook in ("policy_loss", "regularize"):
        yield from _wrong_loss(hook, args[0], result)


def row_of_each(method: type[Method], rollouts: Rollouts) -> Tensor:
    """The row each advantage of this class belongs to: one per row, or one per turn."""
    if method.advantages_per == "turn" and rollouts.turns is not None:
        return rollouts.turns.row
    return torch.arange(len(rollouts))


def _wrong_advantages(method: type[Method], rollouts: Rollouts, advantages: Tensor) -> Iterator[str]:
    if advantages.dtype != torch.float64:
        yield f"`advantages` returns {advantages.dtype}; numbers of rows are float64, like `rollouts.reward`."
    n = rollouts.groups.rows(rollouts.groups.n(rollouts.reward))
    scored = (~torch.isnan(rollouts.reward) & (n > 1))[row_of_each(method, rollouts)]
    if advantages.shape == scored.shape and bool(torch.isnan(advantages[scored]).any()):
        yield (
            "`advantages` gives NaN to rows that have a reward. Two causes are frequent: 0 / 0 in a group of equal "
            "rewards (add an epsilon to the divisor), and rows without a reward (NaN) in a statistic (those of "
            "`rollouts.groups` leave them out)."
        )


def _wrong_loss(hook: str, terms: Terms, loss: Any) -> Iterator[str]:
    if not isinstance(loss, Tensor) or loss.shape != terms.mask.shape:
        shape = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
        yield f"`{hook}` returns {shape}; it must be (rows, time), one value per token."
    elif not loss.requires_grad and (hook == "policy_loss" or bool(loss[terms.mask > 0].any())):
        yield f"`{hook}` has no gradient; it must depend on `terms.logprobs` without `detach`."
