"""The states of a masked diffusion rollout, rebuilt from one small number per token, and log-probs in them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_NEVER = -1e30  # a logit of no probability; with -inf entropies would be NaN

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
    without_mask: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-prob of every token in the state in which it was unmasked: one pass of the model per step.

        lp_t = log softmax(model(x^i))_t,   i = unmasked_at_t,   x^i the answer before step i

    Args:
        model: gives logits of prompt and answer.
        prompt: (rows, prompt) int64.
        answer, unmasked_at: (rows, tokens).
        steps: S.
        entropies: compute them, too, with gradient.
        recompute: keep the activations of one state at a time: each pass is made again when its gradient is taken.
        without_mask: the mask has no probability, as in the decoding, which never chooses it. The authors' code leaves
            it in.

    Returns:
        (rows, tokens) float32 log-probs, and entropies in nats or None. Temperature is not applied, as in the authors'
        code.

    Source: arXiv 2509.23924, CJ-GRPO; `compute_loss` in cj-grpo/cj_grpo_trainer_*.py of yjyddq/EOSER-ASS-RL.
    """

    def in_state(step: int) -> tuple[Tensor, Tensor]:
        state = torch.cat([prompt, state_at(answer, unmasked_at, step, mask_id)], dim=1)
        logits = model(state)[:, prompt.shape[1] :]
        here = unmasked_at == step
        chosen = logits[here].float()  # of the tokens of this step only
        if without_mask:
            chosen = chosen.index_fill(-1, torch.tensor(mask_id, device=chosen.device), _NEVER)
        picked = torch.log_softmax(chosen, dim=-1)
        logprobs = picked.gather(-1, answer[here][:, None])[:, 0]
        spread = -(picked.exp() * picked).sum(-1) if entropies else picked.new_zeros(len(picked))
        return logprobs, spread

    logprobs = torch.zeros(answer.shape, dtype=torch.float32, device=answer.device)
    spread = torch.zeros_like(logprobs)
    for step in range(steps):
        here = unmasked_at == step
        found = checkpoint(in_state, step, use_reentrant=False) if recompute else in_state(step)
        logprobs = logprobs.masked_scatter(here, found[0])
        spread = spread.masked_scatter(here, found[1]) if entropies else spread
    return logprobs, spread if entropies else None


def step_weights(unmasked_at: Tensor, steps: int) -> Tensor:
    """Weights with which a mean over tokens gives every decoding step the same weight.

        w_t = L / (S n_i),   i = unmasked_at_t,   n_i the tokens of the row that step i unmasked

    Args:
        unmasked_at: (rows, tokens) int.
        steps: S.

    Returns:
        (rows, tokens) float32; each row adds up to L, if every step unmasked a token of it.

    Source: `compute_loss` in cj-grpo/cj_grpo_trainer_*.py of yjyddq/EOSER-ASS-RL, whose mean over steps of the means of
    their tokens this is.
    """
    rows, length = unmasked_at.shape
    place = unmasked_at.long()
    counts = torch.zeros(rows, steps, device=place.device).scatter_add_(1, place, torch.ones_like(place).float())
    return length / (steps * counts.gather(1, place))
