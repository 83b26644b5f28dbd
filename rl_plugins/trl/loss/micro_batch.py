"""The loss of one micro-batch: TRL's own, with the surrogate of a method in place of TRL's and terms added.

TRL's loss runs with advantages 0: its surrogate and the surrogate's gradient vanish, while KL, entropy bonus, auxiliary
loss and metrics stay as they are. The method's term is computed on the same live log-probs and entropies, masked like
TRL's surrogate (entropy quantile, off-policy mask, vLLM's importance ratio) and aggregated like it. Where TRL has the
seam `_transform_per_token_loss` (patches/trl/T3), the method's surrogate goes through that instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from rl_plugins.core.errors import MethodError
from rl_plugins.core.losses import TRL_AGGREGATION, aggregate
from rl_plugins.core.rollouts import Rows, Terms
from rl_plugins.runtime import update
from rl_plugins.runtime.ranks import gather
from rl_plugins.trl.capabilities import ROW_LOSSES
from rl_plugins.trl.host import (
    NEWEST_VERSION,
    PUBLISHED,
    ROW_COLUMN,
    TOKEN_COLUMN,
    VERSION,
    VERSIONS,
    HostBatch,
    Trainer,
    logprobs_of,
    loss_mask,
    more_model_input,
)

HostLoss = Callable[[Any, HostBatch], Tensor]


class LossPass:
    """What TRL's loss computes of one micro-batch; the trainer tells it while that runs.

    Args:
        inputs: the micro-batch.
        through_seam: the surrogate is asked for by `_transform_per_token_loss`.
    """

    def __init__(self, inputs: HostBatch, through_seam: bool) -> None:
        self.inputs, self.through_seam = inputs, through_seam
        self.logprobs: Tensor | None = None
        self.entropies: Tensor | None = None
        self.entropy_mask: Tensor | None = None

    def saw(self, logprobs: Tensor, entropies: Tensor | None) -> None:
        """Only the first pass is the loss's own."""
        if self.logprobs is None:
            self.logprobs, self.entropies = logprobs, entropies

    def terms(self, trainer: Trainer) -> Terms:
        """What hooks in the loss see of this micro-batch."""
        if self.logprobs is None:
            raise MethodError(
                "TRL's loss did not compute log-probs where rl-plugins expects it; see rl_plugins.trl.compat."
            )
        inputs, logprobs = self.inputs, self.logprobs
        advantages = inputs["advantages"]
        advantages = (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(logprobs)
        share = trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
        columns = {k.removeprefix(ROW_COLUMN): v[:, None] for k, v in inputs.items() if k.startswith(ROW_COLUMN)}
        columns |= {k.removeprefix(TOKEN_COLUMN): v for k, v in inputs.items() if k.startswith(TOKEN_COLUMN)}
        return Terms(
            mask=loss_mask(inputs),
            logprobs=logprobs,
            entropies=self.entropies if "current_entropies" in trainer.methods.needs else None,
            advantages=advantages,
            old_logprobs=inputs.get("old_per_token_logps", logprobs.detach()),
            num_tokens=inputs["num_items_in_batch"] * share,
            num_rows=inputs["rlp_num_rows"] * share,
            max_length=trainer.max_completion_length,
            rollout_logprobs=inputs.get("rlp_rollout_logprobs"),
            ref_logprobs=inputs.get("ref_per_token_logps"),
            columns=columns,
            versions=inputs.get(VERSIONS),
            **_published(trainer, inputs),
        )


def before_update(trainer: Trainer) -> float:
    """Row sums of the coming optimizer step over all ranks, to every method; columns into its micro-batches.

    Returns:
        A factor on the learning rate.
    """
    window = _window(trainer)
    parts = gather(trainer.accelerator, _rows_of(trainer, window))
    asked = update.before_update(trainer.methods, parts, trainer.accelerator.process_index)
    for name, values in asked.columns.items():
        start = 0
        for batch in window:
            rows = len(batch["completion_ids"])
            batch[ROW_COLUMN + name] = values[start : start + rows].to(batch["completion_ids"].device)
            start += rows
    return asked.lr_scale


def nothing_trained(trainer: Trainer, inputs: HostBatch) -> bool:
    """Whether rows left, and with them every token of the coming optimizer step, on all ranks. AdamW would move the
    weights without a gradient, too."""
    if "rlp_num_rows" not in inputs:
        return False
    tokens = torch.stack([loss_mask(b).sum() for b in _window(trainer) or [inputs]]).sum()
    return int(inputs["num_items_in_batch"] * trainer.accelerator.gather(tokens).sum()) == 0  # one read for both


def no_loss(trainer: Trainer) -> Tensor:
    """A loss without any parameter. A loss scale (fp16) and DeepSpeed want gradients of what a rank holds whole:
    there they are 0, and the optimizer does not see them either, see checkpoint.py."""
    zero = torch.zeros((), device=trainer.accelerator.device, requires_grad=True)
    if trainer.accelerator.scaler is None and not trainer.is_deepspeed_enabled:
        return zero
    return zero + sum(0.0 * p.sum() for p in trainer.model.parameters() if p.requires_grad and p.numel())


def _window(trainer: Trainer) -> list[HostBatch]:
    """Micro-batches of the coming optimizer step, of this rank; none outside of training."""
    first = trainer._step % trainer.args.steps_per_generation
    return (trainer._buffered_inputs or [])[first : first + trainer.current_gradient_accumulation_steps]


def _rows_of(trainer: Trainer, window: Sequence[HostBatch]) -> Rows:
    """This rank's rows of an optimizer step."""
    masks = [loss_mask(b) for b in window]

    def current(batch: HostBatch) -> Tensor | None:
        if "current_logprobs" not in trainer.methods.needs:
            return None
        return logprobs_of(trainer, trainer.model, batch, **more_model_input(batch))[0]

    def summed(of: Callable[[HostBatch], Tensor | None]) -> Tensor | None:
        values = [(m, v) for m, b in zip(masks, window, strict=True) if (v := of(b)) is not None]
        return torch.cat([update.row_sums(v, m) for m, v in values]) if values else None

    names = [k for k in window[0] if k.startswith(ROW_COLUMN)]
    return Rows(
        group=torch.cat([b["rlp_group"].cpu() for b in window]),
        length=torch.cat([m.sum(1).cpu() for m in masks]),
        logprobs=summed(current),
        old_logprobs=summed(lambda b: b.get("old_per_token_logps")),
        rollout_logprobs=summed(lambda b: b.get("rlp_rollout_logprobs")),
        columns={k.removeprefix(ROW_COLUMN): torch.cat([b[k].cpu().double() for b in window]) for k in names},
        version=torch.cat([b[VERSION].cpu() for b in window]),
        newest_version=torch.cat([b[NEWEST_VERSION].cpu() for b in window]),
        **_published(trainer, window[0]),
    )


def _published(trainer: Trainer, batch: HostBatch) -> dict[str, int]:
    """The version the generation batch began with, and the optimizer steps since."""
    version = int(batch[PUBLISHED])
    return {"current_version": version, "steps_since_published": trainer.state.global_step - version}


def compute_loss(trainer: Trainer, host_loss: HostLoss, model: Any, seen: LossPass) -> Tensor:
    """The loss of a training micro-batch.

    Args:
        seen: what TRL's loss will compute.
    """
    stack, inputs = trainer.methods, seen.inputs
    own_surrogate = stack.claimed("policy_loss")
    factor = row_loss_factor(trainer, inputs)
    if own_surrogate and not seen.through_seam:
        inputs = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
    metrics = trainer._metrics["train"]
    logged = len(metrics.get("policy_loss", ()))
    loss = host_loss(model, inputs)
    loss = loss if factor is None else loss * factor
    if not stack.claimed("policy_loss", "regularize"):
        return loss
    terms = seen.terms(trainer)
    added = torch.zeros_like(terms.logprobs)
    if own_surrogate and not seen.through_seam:
        added = update.surrogate(stack, terms) * surrogate_mask(trainer, seen, terms)
        for name in [n for n in metrics if n.startswith("clip_ratio/") or n == "cispo_clip_ratio"]:
            del metrics[name]  # with advantages 0 they say nothing about the surrogate that is trained
    regularizer = update.regularizer(stack, terms)
    own = _aggregate(trainer, added if regularizer is None else added + regularizer, terms)
    if len(metrics.get("policy_loss", ())) > logged:  # TRL logs it with an entropy bonus only
        rows = trainer.host_loss.like in ROW_LOSSES  # these TRL logs before it divides by the accumulation steps
        share = own.detach() * (trainer.current_gradient_accumulation_steps if rows else 1)
        metrics["policy_loss"][-1] += trainer.accelerator.gather(share).nanmean().item()
    return loss + own


def row_loss_factor(trainer: Trainer, inputs: HostBatch) -> Tensor | None:
    """What TRL's mean over rows must be multiplied by when rows left: TRL divides by all rows of the micro-batch, the
    exact divisor is this micro-batch's share of the rows that are trained."""
    if "rlp_rows_left" not in inputs or trainer.host_loss.like not in ROW_LOSSES:
        return None
    rows = len(inputs["completion_ids"]) * trainer.accelerator.num_processes * trainer.args.steps_per_generation
    return rows / inputs["rlp_num_rows"].clamp(min=1.0)


def surrogate_mask(trainer: Trainer, seen: LossPass, terms: Terms) -> Tensor:
    """The factors TRL puts on its own surrogate per token."""
    factor = torch.ones_like(terms.logprobs)
    if trainer.off_policy_mask_threshold is not None:
        factor = factor * trainer.get_off_policy_mask(
            advantages=terms.advantages,
            per_token_logps=terms.logprobs.detach(),
            sampling_per_token_logps=seen.inputs.get("sampling_per_token_logps", terms.old_logprobs),
            mask=terms.mask,
            off_policy_threshold=trainer.off_policy_mask_threshold,
        )
    if seen.entropy_mask is not None:
        factor = factor * seen.entropy_mask
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        factor = factor * seen.inputs["importance_sampling_ratio"]
    return factor


def _aggregate(trainer: Trainer, per_token: Tensor, terms: Terms) -> Tensor:
    ranks = trainer.accelerator.num_processes  # gradients are averaged over them
    if trainer.methods.aggregation == "sum":
        return update.masked_sum(per_token, terms.mask) * ranks
    return aggregate(
        per_token,
        terms.mask,
        TRL_AGGREGATION[trainer.host_loss.like],
        num_tokens=terms.num_tokens / ranks,
        num_rows=terms.num_rows / ranks,
        max_length=terms.max_length,
    )
