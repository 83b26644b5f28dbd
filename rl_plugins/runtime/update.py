"""What methods do in one optimizer step: `before_update` on all of its rows, and the hooks in the loss.

An adapter gathers the rows of the step from all ranks, calls `before_update`, and writes the columns into its own
batch; in the loss it calls `surrogate` and `regularizer`. What a hook returns is checked here, once for every host.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields

import torch
from torch import Tensor

from rl_plugins.core.errors import MethodError
from rl_plugins.core.losses import widest
from rl_plugins.core.rollouts import Rows, Terms, Update
from rl_plugins.runtime import validate
from rl_plugins.runtime.stack import MethodStack

SKIPPED = "rl_plugins/steps_skipped"  # metric: share of optimizer steps whose gradient was not finite
MAX_SKIPPED = 32  # a loss scale of 2**16 needs 16 to come down to 1


def before_update(stack: MethodStack, parts: Sequence[Rows], rank: int) -> Update:
    """Asks every method that claims `before_update`, on every rank with the same rows.

    Args:
        parts: rows of the optimizer step of each rank, on the CPU; rows that are not trained have length 0.
        rank: this one. Every rank logs the same, and only rank 0 keeps it.

    Returns:
        The product of the learning-rate factors, and columns for this rank's rows, (rows,) float32: 0 for rows that
        are not trained.

    Raises:
        MethodError: from a hook, or for an illegal return value.
    """
    together = _joined(parts)
    trained = together.length > 0
    rows = _taken(together, trained)
    first = sum(len(p.length) for p in parts[:rank])
    mine = slice(first, first + len(parts[rank].length))
    scale, columns = 1.0, dict[str, Tensor]()
    for m in stack.claims["before_update"]:
        update = stack.call("before_update", m, rows)
        if update is None:
            continue
        with validate.invalid_returns(m, "before_update"):
            checked = validate.update(m, update, len(rows.length))
        scale *= checked.lr_scale
        stack.lr_scales[m.name] = checked.lr_scale
        for name, values in checked.columns.items():
            full = torch.zeros(len(trained), dtype=torch.float32)
            full[trained] = values
            columns[name] = full[mine]
    if rank:
        stack.metrics.take()
    return Update(scale, columns)


def surrogate(stack: MethodStack, terms: Terms) -> Tensor:
    """(rows, time) the surrogate of the method that claims `policy_loss`.

    Raises:
        MethodError: from the hook, or for an illegal return value.
    """
    m = stack.claims["policy_loss"][0]
    value = stack.call("policy_loss", m, terms)
    with validate.invalid_returns(m, "policy_loss"):
        return validate.per_token(m, "policy_loss", value, terms, gradient=True)


def regularizer(stack: MethodStack, terms: Terms) -> Tensor | None:
    """(rows, time) the sum of what `regularize` hooks add to the loss; None if no method claims it.

    Raises:
        MethodError: from a hook, or for an illegal return value.
    """
    total = None
    for m in stack.claims["regularize"]:
        value = stack.call("regularize", m, terms)
        with validate.invalid_returns(m, "regularize"):
            term = validate.per_token(m, "regularize", value, terms, gradient=False)
        total = term if total is None else total + term
    return total


def check_gradient(stack: MethodStack, norm: float) -> None:
    """For a host that would make the optimizer step all the same, and have NaN weights then.

    Args:
        norm: of the gradient of an optimizer step.

    Raises:
        MethodError: it is NaN or infinite.
    """
    if not math.isfinite(norm):
        raise MethodError(
            f"The norm of the gradient is {norm}, so that nothing good can come of this optimizer step. Training ends "
            f"here, and the last checkpoint is good. {_in_the_loss(stack)}"
        )


class SkippedSteps:
    """For a host that itself skips optimizer steps whose gradient is not finite: says so, and ends training when it
    does nothing else."""

    def __init__(self) -> None:
        self.in_a_row = 0

    def count(self, stack: MethodStack, share: float) -> None:
        """After the optimizer steps that a host makes at a time.

        Args:
            share: of them that were skipped.

        Raises:
            MethodError: for the last `MAX_SKIPPED` times all of them were.
        """
        self.in_a_row = self.in_a_row + 1 if share == 1 else 0
        if self.in_a_row >= MAX_SKIPPED:
            raise MethodError(
                f"The gradient was NaN or infinite {self.in_a_row} times in a row. The host skipped these optimizer "
                f"steps, so the weights are good, but nothing is learned. {_in_the_loss(stack)}"
            )
        if share:
            stack.warn_once(
                f"The gradient of an optimizer step is NaN or infinite, and the host skips the step. The metric "
                f"{SKIPPED} is the share of such steps. {_in_the_loss(stack)}"
            )


def _in_the_loss(stack: MethodStack) -> str:
    """Where to look."""
    hooks = ("before_update", "policy_loss", "regularize")
    found = [f"`{m.name}` ({hook})" for hook in hooks for m in stack.claims[hook]]
    if not found:
        makers = [f"`{m.name}` ({hook})" for hook in ("advantages", "shape") for m in stack.claims[hook]]
        made = f"the advantages are made by {', '.join(makers)}" if makers else "nor makes one the advantages"
        return (
            f"No method is in the loss; {made}. Look at the size of the rewards, the learning rate, and the dtype of "
            f"the model."
        )
    return (
        f"In the loss: {', '.join(found)}. What they returned was finite, and so was its gradient: look at how large "
        f"it is, at the learning rate, and at the dtype of the model. Remove the method from `methods` to go on "
        f"without it."
    )


def masked_sum(per_token: Tensor, mask: Tensor) -> Tensor:
    """Sum over trained tokens: what a loss with `aggregation = "sum"` is. Values at masked tokens may be NaN."""
    return torch.where(mask > 0, per_token, 0.0).sum()


def row_sums(values: Tensor, mask: Tensor) -> Tensor:
    """(rows,) float64 sums over trained tokens, on the CPU: what `before_update` gets of a column per token."""
    return torch.where(mask > 0, values, 0.0).to(widest(values.device)).sum(1).cpu().double()


_NOT_ROWS = ("columns", "current_version", "steps_since_published")  # fields of `Rows` that are not a tensor of rows


def _joined(parts: Sequence[Rows]) -> Rows:
    """The rows of all ranks, in rank order."""

    def cat(values: list[Tensor | None]) -> Tensor | None:
        given = [v for v in values if v is not None]
        return torch.cat(given) if given else None

    names = [f.name for f in fields(Rows) if f.name not in _NOT_ROWS]
    columns = {k: torch.cat([p.columns[k] for p in parts]) for k in parts[0].columns}
    return parts[0].replace(**{n: cat([getattr(p, n) for p in parts]) for n in names}, columns=columns)


def _taken(rows: Rows, keep: Tensor) -> Rows:
    names = [f.name for f in fields(Rows) if f.name not in _NOT_ROWS and getattr(rows, f.name) is not None]
    return rows.replace(
        **{n: getattr(rows, n)[keep] for n in names}, columns={k: v[keep] for k, v in rows.columns.items()}
    )
