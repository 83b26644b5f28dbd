"""The loss of one micro-batch: TRL's own, with the surrogate of a method in place of TRL's and terms added.

TRL's loss runs with advantages 0: its surrogate and the surrogate's gradient vanish, while KL, entropy bonus, auxiliary
loss and metrics stay as they are. The method's term is computed on the same live log-probs and entropies, masked like
TRL's surrogate (entropy quantile, off-policy mask, vLLM's importance ratio) and aggregated like it. Where TRL has the
seam `_transform_per_token_loss` (patches/trl/T3), the method's surrogate goes through that instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from rl_plugins.errors import MethodError
from rl_plugins.losses import TRL_AGGREGATION, aggregate
from rl_plugins.rollouts import Terms
from rl_plugins.trl.batch import ROW_COLUMN, TOKEN_COLUMN
from rl_plugins.trl.facts import ROW_LOSSES

HostLoss = Callable[[Any, dict[str, Any]], Tensor]


def compute_loss(trainer: Any, host_loss: HostLoss, model: Any, inputs: dict[str, Any]) -> Tensor:
    """The loss of a training micro-batch."""
    stack, seams = trainer.methods, trainer._seams
    factor = row_loss_factor(trainer, inputs)
    if not stack.claimed("policy_loss", "regularize"):
        return host_loss(model, inputs) * factor if factor is not None else host_loss(model, inputs)
    own_surrogate = stack.claimed("policy_loss")
    through_seam = own_surrogate and seams.transform_per_token_loss and stack.aggregation == "host"
    host_inputs = inputs
    if own_surrogate and not through_seam:
        host_inputs = {**inputs, "advantages": torch.zeros_like(inputs["advantages"])}
    logged = len(trainer._metrics["train"].get("policy_loss", ()))
    with _tap(trainer) as seen:
        trainer._live_inputs, trainer._live_tensors = (inputs if through_seam else None), seen
        try:
            loss = host_loss(model, host_inputs)
        finally:
            trainer._live_inputs = trainer._live_tensors = None
    if factor is not None:
        loss = loss * factor
    terms = make_terms(trainer, inputs, seen)
    added = torch.zeros_like(terms.logprobs)
    if own_surrogate and not through_seam:
        added = policy_loss(trainer, terms) * surrogate_mask(trainer, inputs, terms, seen)
        _forget_clip_metrics(trainer)
    for m in stack.claims["regularize"]:
        added = added + _checked(stack, m, "regularize", stack.call("regularize", m, terms), terms)
    own = _aggregate(trainer, added, terms)
    if len(trainer._metrics["train"].get("policy_loss", ())) > logged:  # TRL logs it with an entropy bonus only
        rows = trainer.loss_type in ROW_LOSSES  # these TRL logs before it divides by the accumulation steps
        share = own.detach() * (trainer.current_gradient_accumulation_steps if rows else 1)
        trainer._metrics["train"]["policy_loss"][-1] += trainer.accelerator.gather(share).nanmean().item()
    return loss + own


def policy_loss(trainer: Any, terms: Terms) -> Tensor:
    """The surrogate of the method that claims it, per token."""
    stack = trainer.methods
    return _checked(stack, stack.claims["policy_loss"][0], "policy_loss", stack.one("policy_loss", terms), terms)


def make_terms(trainer: Any, inputs: dict[str, Any], seen: dict[str, Any]) -> Terms:
    """What hooks in the loss see of this micro-batch."""
    logprobs, entropies = seen["logprobs"], seen["entropies"]
    mask = inputs["completion_mask"] * inputs.get("tool_mask", 1)
    advantages = inputs["advantages"]
    advantages = (advantages[:, None] if advantages.dim() == 1 else advantages).expand_as(logprobs)
    share = trainer.current_gradient_accumulation_steps / trainer.args.steps_per_generation
    columns = {k.removeprefix(ROW_COLUMN): v[:, None] for k, v in inputs.items() if k.startswith(ROW_COLUMN)}
    columns |= {k.removeprefix(TOKEN_COLUMN): v for k, v in inputs.items() if k.startswith(TOKEN_COLUMN)}
    old = inputs.get("old_per_token_logps")
    return Terms(
        mask=mask,
        logprobs=logprobs,
        entropies=entropies if "current_entropies" in trainer.methods.needs else None,
        advantages=advantages,
        old_logprobs=logprobs.detach() if old is None else old,
        num_tokens=inputs["num_items_in_batch"] * share,
        num_rows=inputs["rlp_num_rows"] * share,
        max_length=trainer.max_completion_length,
        rollout_logprobs=inputs.get("rlp_rollout_logprobs"),
        ref_logprobs=inputs.get("ref_per_token_logps"),
        columns=columns,
    )


def row_loss_factor(trainer: Any, inputs: dict[str, Any]) -> Tensor | None:
    """What TRL's mean over rows must be multiplied by when rows left: TRL divides by all rows of the micro-batch, the
    exact divisor is this micro-batch's share of the rows that are trained."""
    if "rlp_rows_left" not in inputs or trainer.loss_type not in ROW_LOSSES:
        return None
    rows = len(inputs["completion_ids"]) * trainer.accelerator.num_processes * trainer.args.steps_per_generation
    factor: Tensor = rows / inputs["rlp_num_rows"].clamp(min=1.0)
    return factor


def surrogate_mask(trainer: Any, inputs: dict[str, Any], terms: Terms, seen: dict[str, Any]) -> Tensor:
    """The factors TRL puts on its own surrogate per token."""
    factor = torch.ones_like(terms.logprobs)
    if trainer.off_policy_mask_threshold is not None:
        factor = factor * trainer.get_off_policy_mask(
            advantages=terms.advantages,
            per_token_logps=terms.logprobs.detach(),
            sampling_per_token_logps=inputs.get("sampling_per_token_logps", terms.old_logprobs),
            mask=terms.mask,
            off_policy_threshold=trainer.off_policy_mask_threshold,
        )
    if seen.get("entropy_mask") is not None:
        factor = factor * seen["entropy_mask"]
    if trainer.use_vllm and trainer.vllm_importance_sampling_correction:
        factor = factor * inputs["importance_sampling_ratio"]
    return factor


def _aggregate(trainer: Any, per_token: Tensor, terms: Terms) -> Tensor:
    ranks = trainer.accelerator.num_processes  # gradients are averaged over them
    if trainer.methods.aggregation == "sum":
        return torch.where(terms.mask > 0, per_token, 0.0).sum() * ranks
    return aggregate(
        per_token,
        terms.mask,
        TRL_AGGREGATION[trainer.loss_type],
        num_tokens=terms.num_tokens / ranks,
        num_rows=terms.num_rows / ranks,
        max_length=terms.max_length,
    )


def _checked(stack: Any, method: Any, hook: str, value: Any, terms: Terms) -> Tensor:
    try:
        return torch.broadcast_to(value, terms.logprobs.shape)
    except (RuntimeError, TypeError):
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise stack.refuse(
            method, hook, f"a tensor of shape {tuple(terms.logprobs.shape)} is needed, it gave {given}."
        ) from None


@contextmanager
def _tap(trainer: Any) -> Iterator[dict[str, Any]]:
    """Lets the live log-probs, entropies and the entropy mask be seen while TRL's loss computes them."""
    seen: dict[str, Any] = {}
    passes, masks = trainer._get_per_token_logps_and_entropies, trainer.get_high_entropy_mask

    def tapped_pass(*args: Any, **kwargs: Any) -> Any:
        result = passes(*args, **kwargs)
        if "logprobs" not in seen:
            seen["logprobs"], seen["entropies"] = result[0], result[1]
        return result

    def tapped_mask(*args: Any, **kwargs: Any) -> Any:
        seen["entropy_mask"] = masks(*args, **kwargs)
        return seen["entropy_mask"]

    trainer._get_per_token_logps_and_entropies, trainer.get_high_entropy_mask = tapped_pass, tapped_mask
    try:
        yield seen
    finally:
        del trainer._get_per_token_logps_and_entropies, trainer.get_high_entropy_mask
    if "logprobs" not in seen:
        raise MethodError(
            "TRL's loss did not compute log-probs where rl-plugins expects it; see rl_plugins.trl.compat."
        )


def _forget_clip_metrics(trainer: Any) -> None:
    """With advantages 0 TRL's clip ratios say nothing about the surrogate that is trained."""
    for name in [n for n in trainer._metrics["train"] if n.startswith("clip_ratio/") or n == "cispo_clip_ratio"]:
        del trainer._metrics["train"][name]
