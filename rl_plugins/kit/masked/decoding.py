"""Decoding of masked diffusion language models: from an answer of masks, the most confident tokens are unmasked first.

EOSER (arXiv 2509.23924): early in decoding the end token is the most confident one, and answers end early. The
confidence of places that hold the end token is multiplied by a factor that grows to 1 over the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.core.losses import widest
from rl_plugins.kit.masked.schedules import ascending_blocks, ascending_schedule, uniform_schedule
from rl_plugins.kit.masked.states import Model

AT_ONCE = 2**23  # numbers in float64, 64 MB: all rows of a batch with a large vocabulary are gigabytes
_CHOICES = {
    "schedule": ("uniform", "ascending"),
    "remasking": ("confidence", "random"),
    "end_index": ("decoding", "block"),
}


@dataclass(frozen=True)
class Decoding:
    """How answers are decoded.

    Args:
        length: L, tokens of an answer; those after the first end token are part of it.
        steps: S; None: one per two tokens (uniform), floor(log2 L) (ascending, which allows no other number).
        schedule: "uniform" or "ascending" (1, 2, 4 and more tokens).
        blocks: the answer is decoded block after block from the left; 1: all at once.
        temperature: tau of the Gumbel noise; 0: the most likely token.
        guidance: w of classifier-free guidance; 0: none, otherwise every step costs two passes.
        remasking: "confidence": the most confident tokens are unmasked; "random": any.
        end_start, end_stop: factor of the confidence of end tokens in the first and in the last step; 1: no change.
        end_index: "decoding": the step of the whole decoding; "block": the step inside its block, as in the authors'
            code, where the factor reaches its end only if there is one block.

    Raises:
        ConfigError: values that do not fit each other.
    """

    length: int
    steps: int | None = None
    schedule: Literal["uniform", "ascending"] = "uniform"
    blocks: int = 1
    temperature: float = 1.0
    guidance: float = 0.0
    remasking: Literal["confidence", "random"] = "confidence"
    end_start: float = 1.0
    end_stop: float = 1.0
    end_index: Literal["decoding", "block"] = "decoding"

    def __post_init__(self) -> None:
        for option, allowed in _CHOICES.items():
            if getattr(self, option) not in allowed:
                given = getattr(self, option)
                raise ConfigError(f"`{option}` of the decoding is {shown(given)}; allowed: {', '.join(allowed)}.")
        for option in ("temperature", "guidance", "end_start", "end_stop"):
            value = getattr(self, option)
            if not 0 <= value < math.inf:
                raise ConfigError(f"`{option}` of the decoding is {value}; it must be a number of at least 0.")
        if self.schedule == "ascending":
            needed = len(ascending_schedule(self.length))
            ascending_blocks(self.length, self.blocks)
            if self.steps not in (None, needed):
                raise ConfigError(
                    f"`steps` is {self.steps}; the ascending schedule of {self.length} tokens has {needed}. Leave "
                    f"`steps` out, or take the uniform schedule."
                )
            return
        if self.length < 1 or self.number_of_steps < 1:
            raise ConfigError(f"An answer has {self.length} tokens and {self.steps} steps; both must be at least 1.")
        if self.number_of_steps > self.length:
            raise ConfigError(
                f"An answer of {self.length} tokens cannot be decoded in {self.number_of_steps} steps, one token each "
                f"at least. Set the number of steps to {self.length} or fewer."
            )
        if self.blocks < 1 or self.length % self.blocks or self.number_of_steps % self.blocks:
            raise ConfigError(
                f"`blocks` is {self.blocks}; it must divide the length ({self.length}) and the number of steps "
                f"({self.number_of_steps}) of the uniform schedule."
            )

    @property
    def number_of_steps(self) -> int:
        """S."""
        if self.schedule == "ascending":
            return len(ascending_schedule(self.length))
        return max(1, self.length // 2) if self.steps is None else self.steps

    def plan(self) -> Iterator[tuple[int, int, int, int]]:
        """Per step: its number, its number inside the block, the end of the block, tokens that are unmasked."""
        if self.schedule == "ascending":
            sizes, end = ascending_schedule(self.length), 0
            for size, steps in ascending_blocks(self.length, self.blocks):
                end += size
                yield from ((step, i, end, sizes[step]) for i, step in enumerate(steps))
            return
        size, per_block = self.length // self.blocks, self.number_of_steps // self.blocks
        tokens = uniform_schedule(torch.tensor([size]), per_block)[0].tolist()
        for block in range(self.blocks):
            yield from ((block * per_block + i, i, (block + 1) * size, tokens[i]) for i in range(per_block))

    def end_factor(self, step: int, step_in_block: int) -> float:
        """Factor of the confidence of end tokens in a step."""
        index = step if self.end_index == "decoding" else step_in_block
        return end_factor(index, self.number_of_steps, self.end_start, self.end_stop, self.schedule)


class Decoded(NamedTuple):
    """An answer: (rows, tokens) ids, and the step in which each of them was unmasked."""

    answer: Tensor
    unmasked_at: Tensor


def end_factor(step: int, steps: int, start: float, stop: float, schedule: str = "uniform") -> float:
    """Factor of the confidence of end tokens (EOSER).

        uniform     f_i = start + (stop - start) i / (S - 1);  S = 1: stop
        ascending   f_i = start + (stop - start) (2^(i+1) - 1) / 2^S

    Args:
        step: i, from 0.
        steps: S.
        start, stop: gamma_min and gamma_max of the authors' code.

    Source: `sampling` and `ass_sampling` in cj-grpo/cj_grpo_trainer_*.py of yjyddq/EOSER-ASS-RL.
    """
    if schedule == "ascending":
        grown = (2.0 ** (step + 1) - 1) / 2.0**steps
    else:
        grown = min(max(step, 0), steps - 1) / (steps - 1) if steps > 1 else 1.0
    return start + (stop - start) * grown


def scaled_confidence(
    logits: Tensor, chosen: Tensor, end_id: int | Sequence[int] | None, factor: float = 1.0
) -> Tensor:
    """(rows, tokens) probability of the chosen tokens, without noise; that of end tokens is multiplied by `factor`."""
    confidence = torch.softmax(logits, dim=-1).gather(-1, chosen[..., None])[..., 0]
    if end_id is None:
        return confidence
    return torch.where(torch.isin(chosen, torch.tensor(end_id, device=chosen.device)), confidence * factor, confidence)


def decode(
    model: Model,
    prompt: Tensor,
    how: Decoding,
    mask_id: int,
    end_id: int | Sequence[int] | None,
    generator: torch.Generator | None = None,
    unconditional: Model | None = None,
) -> Decoded:
    """Answers to prompts.

    Per step i, with z the logits of the answer's places and u uniform noise of every place and token:

        x    = argmax_v z_v - tau log(-log u_v)
        c    = softmax(z)_x, times the factor of step i where x is the end token, both in float64
        the n_i masked places of the block with the largest c get x

    Args:
        model: logits of prompt and answer.
        prompt: (rows, prompt) int64.
        end_id: the end token, or several of them; None: there is none.
        unconditional: with guidance: logits without the prompt; by default the model on a masked prompt.

    Returns:
        Answers without a mask, and when each token was unmasked. The mask itself is never chosen.
    """
    rows, device = len(prompt), prompt.device
    answer = torch.full((rows, how.length), mask_id, dtype=torch.int64, device=device)
    unmasked_at = torch.full((rows, how.length), how.number_of_steps, dtype=torch.int64, device=device)
    place = torch.arange(how.length, device=device)
    for step, in_block, end, count in how.plan():
        logits = _logits(model, prompt, answer, how, mask_id, unconditional)
        together = max(1, AT_ONCE // max(1, logits[:1].numel()))  # rows
        factor, parts = how.end_factor(step, in_block), list[tuple[Tensor, Tensor]]()
        for part in torch.split(logits, together):
            wide = part.to(widest(device))
            wide[..., mask_id] = -torch.inf
            tokens = _choose(wide, how.temperature, generator)
            parts.append((tokens, scaled_confidence(wide, tokens, end_id, factor)))
        chosen, confidence = (torch.cat(of_parts) for of_parts in zip(*parts, strict=True))
        if how.remasking == "random":
            confidence = torch.rand(confidence.shape, generator=generator, device=device, dtype=confidence.dtype)
        free = (answer == mask_id) & (place < end)
        confidence = torch.where(free, confidence, -torch.inf)
        best = confidence.topk(count, dim=-1).indices
        answer = answer.scatter(1, best, chosen.gather(1, best))
        unmasked_at = unmasked_at.scatter(1, best, step)
    return Decoded(answer, unmasked_at)


def _logits(
    model: Model, prompt: Tensor, answer: Tensor, how: Decoding, mask_id: int, unconditional: Model | None
) -> Tensor:
    """(rows, tokens, vocabulary) logits of the answer's places, as the model gives them."""
    with torch.no_grad():
        logits = model(torch.cat([prompt, answer], dim=1))[:, prompt.shape[1] :]
        if how.guidance:
            hidden = torch.full_like(prompt, mask_id)
            plain = (unconditional or model)(torch.cat([hidden, answer], dim=1))[:, prompt.shape[1] :]
            logits = plain + (how.guidance + 1) * (logits - plain)
    return logits


def _choose(logits: Tensor, temperature: float, generator: torch.Generator | None) -> Tensor:
    if temperature == 0:
        return logits.argmax(-1)
    noise = torch.rand(logits.shape, generator=generator, device=logits.device, dtype=logits.dtype)
    return (logits - temperature * torch.log(-torch.log(noise))).argmax(-1)
