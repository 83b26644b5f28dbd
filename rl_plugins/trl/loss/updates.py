"""What the trace records of optimizer steps: factors on the learning rate, and importance ratios token by token.

Ratios cost no pass: they are made of the log-probs that TRL's loss computes, and of the old ones. Every rank keeps
those of its micro-batches until the step is done; then the driver gets them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.rollouts import RowRatio
from rl_plugins.runtime.ranks import gather
from rl_plugins.trl.host import HostBatch, Trainer, loss_mask

ROW = "rlp_trace_row"
"""Key in TRL's batch: number of the row in the batch of the driver, -1 for rows that fill it up."""
_CLIPPED = ("grpo", "bnpo", "dr_grpo", "dapo", "luspo")
"""`loss_type` whose surrogate has no gradient outside of the clip range."""


class UpdatesSeen:
    """Collects what an optimizer step did.

    Args:
        trainer: with a stack that has watchers.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._own: list[RowRatio] = []

    @property
    def wants_ratios(self) -> bool:
        return any(w.wants_ratios for w in self.trainer.methods.watchers)

    def saw_loss(self, inputs: HostBatch, logprobs: Tensor | None) -> None:
        """After the loss of a micro-batch.

        Args:
            logprobs: (rows, time) at the weights of this step.
        """
        if logprobs is None or ROW not in inputs:
            return
        mask = loss_mask(inputs).bool().cpu()
        old = inputs.get("old_per_token_logps", logprobs)
        ratio = self._ratio((logprobs - old).detach().float().cpu(), mask)
        clipped = self._clipped(ratio, inputs["advantages"].detach().cpu())
        for i, row in enumerate(inputs[ROW].tolist()):
            if row >= 0 and bool(mask[i].any()):
                stop = int(mask[i].nonzero()[-1]) + 1
                values = torch.where(mask[i], ratio[i], torch.nan)[:stop]
                self._own.append(RowRatio(row, values, None if clipped is None else (clipped[i] & mask[i])[:stop]))

    def step_done(self) -> None:
        """After an optimizer step, on every rank."""
        t, own = self.trainer, self._own
        self._own = []
        ratios = [r for part in gather(t.accelerator, own) for r in part] if self.wants_ratios else []
        scaled, t.methods.lr_scales = t.methods.lr_scales, {}
        if t.accelerator.is_main_process:
            for watcher in t.methods.watchers:
                watcher.updated(scaled, ratios)

    def _ratio(self, change: Tensor, mask: Tensor) -> Tensor:
        """(rows, time) importance ratios as the loss uses them."""
        if self.trainer.args.importance_sampling_level == "sequence":
            mean = torch.where(mask, change, 0.0).sum(1) / mask.sum(1).clamp(min=1)
            change = mean[:, None].expand_as(change)
        return change.exp()

    def _clipped(self, ratio: Tensor, advantages: Tensor) -> Tensor | None:
        """(rows, time) bool, tokens without a gradient because of TRL's clip; None where the surrogate has another."""
        t: Any = self.trainer
        if t.methods.claims["policy_loss"] or t.loss_type not in _CLIPPED:
            return None
        a = advantages[:, None] if advantages.dim() == 1 else advantages
        return ((ratio < 1 - t.epsilon_low) & (a < 0)) | ((ratio > 1 + t.epsilon_high) & (a > 0))


def with_rows(out: HostBatch, rows: int, first: int) -> HostBatch:
    """TRL's batch with the numbers of its rows.

    Args:
        rows: of this rank, without fillers, which come last.
        first: number of the first of them.
    """
    ids = out["completion_ids"]
    number = torch.full((len(ids),), -1)
    number[:rows] = torch.arange(first, first + rows)
    return {**out, ROW: number.to(ids.device)}


__all__ = ["ROW", "UpdatesSeen", "with_rows"]
