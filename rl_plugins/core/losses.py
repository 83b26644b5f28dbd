"""The surrogates that methods start from, and the ways the hosts turn per-token losses into one number.

Shapes: (rows, time) for everything per token; a column per row is (rows, 1). Gradient flows through `logprobs` only.
The arithmetic is that of the hosts: float32 where the model's log-probs are, no hidden upcast of the graph.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

if TYPE_CHECKING:
    from rl_plugins.core.method import Method
    from rl_plugins.core.rollouts import Terms

# Names of the ways to aggregate (verl's, they say what happens) and the loss types of TRL that use them.
Aggregation = Literal["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
TRL_AGGREGATION: dict[str, Aggregation] = {
    "dapo": "token-mean",
    "cispo": "token-mean",
    "vespo": "token-mean",
    "grpo": "seq-mean-token-mean",
    "sapo": "seq-mean-token-mean",
    "luspo": "seq-mean-token-sum",
    "dr_grpo": "seq-mean-token-sum-norm",
}
LOG_RATIO_LIMIT = 20.0  # both hosts clamp the log-ratio there before exp


class Live:
    """The trained tokens of a micro-batch, in float32 or better. All others are 0 in every factor, because 0 * inf of a
    masked token would be NaN in the loss or in the gradient.

        live = Live(terms)
        lp, old, advantages = live.all("logprobs", "old_logprobs", "advantages")

    Attributes:
        valid: (rows, time) bool, the trained tokens.
        dtype: of the factors.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms, self.valid = terms, terms.mask > 0
        self.dtype = torch.promote_types(terms.logprobs.dtype, torch.float32)

    def __call__(self, values: Tensor) -> Tensor:
        """(rows, time) values of the trained tokens, 0 elsewhere."""
        return torch.where(self.valid, values.to(self.dtype), 0.0)

    def all(self, *names: str) -> tuple[Tensor, ...]:
        """These fields of the terms; every one of them is in the `needs` of the method."""
        return tuple(self(getattr(self.terms, name)) for name in names)

    def log_means(self, method: Method, **values: Tensor) -> None:
        """Logs means over the trained tokens, which micro-batches of any size combine to that of all tokens."""
        tokens = self.valid.sum()
        for name, value in values.items():
            of_token = value.detach().to(torch.promote_types(value.dtype, self.dtype))
            method.log(name, torch.where(self.valid, of_token, 0.0).sum() / tokens, weight=tokens)

    def log_extreme(self, method: Method, name: str, value: Tensor, reduce: Literal["min", "max"]) -> None:
        """Logs the smallest or largest value of a trained token."""
        found = torch.where(self.valid, value.detach(), torch.inf if reduce == "min" else -torch.inf)
        method.log(name, getattr(found, reduce)(), reduce=reduce, weight=self.valid.sum())


def widest(device: torch.device) -> torch.dtype:
    """float64, or float32 where the device has no float64 (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def finite(log_ratio: Tensor) -> Tensor:
    """`log_ratio`, or 0 without gradient where it is not finite."""
    return torch.where(torch.isfinite(log_ratio), log_ratio, 0.0)


def ppo_clip(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    clip_low: Tensor | float = 0.2,
    clip_high: Tensor | float = 0.2,
    dual_clip: float | None = None,
) -> Tensor:
    """PPO's clipped surrogate per token, `-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)` with `r = exp(lp - old)`.

    `clip_low` and `clip_high` may be tensors that broadcast to (rows, time), so every row or token can have its own
    clip range. `dual_clip` c > 1 bounds the loss of tokens with A < 0 by `-c A` (arXiv 1912.09729).
    """
    ratio = torch.exp((logprobs - old_logprobs).clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    clipped = torch.maximum(torch.minimum(ratio, 1 + _as(clip_high, ratio)), 1 - _as(clip_low, ratio))
    loss = -torch.minimum(ratio * advantages, clipped * advantages)
    if dual_clip is not None:
        loss = torch.where(advantages < 0, torch.minimum(loss, -dual_clip * advantages), loss)
    return loss


def weighted_logprob(logprobs: Tensor, weight: Tensor, advantages: Tensor) -> Tensor:
    """The REINFORCE form of CISPO and its kin per token, `-stop_gradient(w) A lp`."""
    return -weight.detach() * advantages * logprobs


def aggregate(
    per_token: Tensor,
    mask: Tensor,
    how: Aggregation,
    *,
    num_tokens: Tensor | float,
    num_rows: Tensor | float,
    max_length: int,
) -> Tensor:
    """One micro-batch's share of the loss of a whole optimizer step.

    Summed over the micro-batches of the step, the shares give the loss of the step, however it was split.

    Args:
        per_token: (rows, time).
        mask: (rows, time), 1 for tokens that are trained. Rows without one count nowhere.
        how: "token-mean" divides by `num_tokens`; "seq-mean-token-mean" averages each row over its tokens and divides
            by `num_rows`; "seq-mean-token-sum" sums each row and divides by `num_rows`; "seq-mean-token-sum-norm"
            divides the latter by `max_length` as well.
        num_tokens, num_rows: tokens and rows with a token of the optimizer step over all micro-batches (and, where the
            host averages gradients over ranks, divided by the number of ranks).
        max_length: the configured completion length.
    """
    per_row = torch.where(mask > 0, per_token, 0.0).sum(-1)
    if how == "token-mean":
        return per_row.sum() / _divisor(num_tokens)
    if how == "seq-mean-token-mean":
        per_row = per_row / mask.sum(-1).clamp(min=1)
    elif how == "seq-mean-token-sum-norm":
        per_row = per_row / max_length
    elif how != "seq-mean-token-sum":
        raise ValueError(f"unknown aggregation {how!r}; allowed: {', '.join(sorted(set(TRL_AGGREGATION.values())))}.")
    return per_row.sum() / _divisor(num_rows)


def _as(value: Tensor | float, like: Tensor) -> Tensor:
    return torch.as_tensor(value, dtype=like.dtype, device=like.device)


def _divisor(n: Tensor | float) -> Tensor | float:
    """`n`, or 1 where it is 0 and there is nothing to divide. Shares below 1 are legal: one row on two ranks is 0.5."""
    return torch.where(n > 0, n, 1.0) if isinstance(n, Tensor) else float(n) or 1.0
