"""The states of a masked diffusion rollout, rebuilt from one small number per token, and log-probs in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

Model = Callable[[Tensor], Tensor]
"""(rows, prompt + answer) token ids -> (rows, prompt + answer, vocabulary) logits; not shifted."""


def state_at(answer: Tensor, unmasked_at: Tensor, step: int, mask_id: int) -> Tensor:
    """The answer as it stood before a step: tokens of earlier steps, and the mask everywhere else.

    Args:
        answer: (rows, tokens) int64, the finished answer.
        unmasked_at: (rows, tokens) int, the step in which each token was unmasked.
    """
    return torch.where(unmasked_at < step, answer, mask_id)


def trajectory_logprobs(
    model: Model,
    prompt: Tensor,
    answer: Tensor,
    unmasked_at: Tensor,
    steps: int,
    mask_id: int,
    entropies: bool = False,
    recompute: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of every token in the state in which it was unmasked: one pass of the model per step.

        lp_t = log softmax(model(x^i))_t,   i = unmasked_at_t,   x^i the answer before step i

    Args:
        model: gives logits of prompt and answer.
        prompt: (rows, prompt) int64.
        answer, unmasked_at: (rows, tokens).
        steps: S. Steps in which no row unmasks a token cost nothing.
        entropies: compute them, too, with gradient.
        recompute: keep the activations of one state at a time: each pass is made again when its gradient is taken.

    Returns:
        (rows, tokens) float32 log-probs, and entropies in nats or None. Temperature is not applied, as in the authors'
        code.

    Source: arXiv 2509.23924, CJ-GRPO; `compute_loss` in cj-grpo/cj_grpo_trainer_*.py of yjyddq/EOSER-ASS-RL.
    """

    def in_state(step: int) -> tuple[Tensor, Tensor]:
        state = torch.cat([prompt, state_at(answer, unmasked_at, step, mask_id)], dim=1)
        logits = model(state)[:, prompt.shape[1] :]
        here = unmasked_at == step
        picked = torch.log_softmax(logits[here].float(), dim=-1)  # of the tokens of this step only
        logprobs = picked.gather(-1, answer[here][:, None])[:, 0]
        spread = -(picked.exp() * picked).sum(-1) if entropies else picked.new_zeros(len(picked))
        return logprobs, spread

    logprobs = torch.zeros(answer.shape, dtype=torch.float32, device=answer.device)
    spread = torch.zeros_like(logprobs)
    for step in range(steps):
        here = unmasked_at == step
        if not bool(here.any()):
            continue
        found = checkpoint(in_state, step, use_reentrant=False) if recompute else in_state(step)
        logprobs = logprobs.masked_scatter(here, found[0])
        spread = spread.masked_scatter(here, found[1]) if entropies else spread
    return logprobs, spread if entropies else None
