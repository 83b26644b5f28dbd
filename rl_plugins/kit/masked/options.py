"""Options of a run that trains a masked diffusion language model. A trainer's config adds them to those of its host."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from rl_plugins.kit.masked.decoding import Decoding


def _option(default: Any, text: str, *choices: str) -> Any:
    return field(default=default, metadata={"help": text} | ({"choices": list(choices)} if choices else {}))


@dataclass
class MaskedOptions:
    """How answers are decoded, and in which states their log-probs are taken.

    Args:
        mask_token_id: id of the mask; None: the tokenizer's mask token.
        diffusion_steps: S, passes of the model that decode an answer; None: one per two tokens (uniform), or
            floor(log2 L) (ascending, which allows no other number).
        unmasking: tokens per step: "uniform", or "ascending": 1, 2, 4 and so on (method `ass`).
        unmasking_blocks: the answer is decoded block after block from the left; 1: all at once.
        guidance: w of classifier-free guidance; 0: none, otherwise every step costs two passes.
        remasking: "confidence": the most confident tokens are unmasked; "random": any.
        end_confidence_start, end_confidence_stop: factor on the confidence of end tokens in the first and in the last
            step; 1: no change (method `eoser`).
        end_confidence_index: "decoding": the step of the whole decoding; "block": the step inside its block.
        logprobs_from: "one_step": every log-prob from one pass over an answer of masks and a prompt with some
            tokens masked, as in diffu-GRPO; "trajectory": each in the state in which its token was unmasked, S
            passes (method `cj_grpo`).
        prompt_masking: with "one_step": chance that a prompt token is masked; drawn once per row and batch.
        step_weight: weight in the loss, with "trajectory": "tokens": every token alike; "equal": every step alike, so
            a token of step i weighs L / (S n_i).
        recompute_states: with "trajectory": keep the activations of one state at a time, and make each pass again
            for its gradient.
    """

    mask_token_id: int | None = _option(None, "Id of the mask; none: the tokenizer's mask token.")
    diffusion_steps: int | None = _option(None, "Passes of the model that decode an answer.")
    unmasking: str = _option("uniform", "Tokens per step.", "uniform", "ascending")
    unmasking_blocks: int = _option(1, "Blocks of the answer, decoded from the left.")
    guidance: float = _option(0.0, "Weight of classifier-free guidance; 0: none.")
    remasking: str = _option("confidence", "Which tokens stay masked.", "confidence", "random")
    end_confidence_start: float = _option(1.0, "Factor on the confidence of end tokens in the first step.")
    end_confidence_stop: float = _option(1.0, "The same in the last step.")
    end_confidence_index: str = _option("decoding", "Step that the factor follows.", "decoding", "block")
    logprobs_from: str = _option("one_step", "States in which log-probs are taken.", "one_step", "trajectory")
    prompt_masking: float = _option(0.15, "With one_step: chance that a prompt token is masked.")
    step_weight: str = _option("tokens", "With trajectory: weight of steps in the loss.", "tokens", "equal")
    recompute_states: bool = _option(False, "With trajectory: keep the activations of one state at a time.")

    def decoding(self, length: int, temperature: float) -> Decoding:
        """The decoding of answers of `length` tokens.

        Raises:
            ConfigError: values that do not fit each other.
        """
        return Decoding(
            length=length,
            steps=self.diffusion_steps,
            schedule=self.unmasking,  # type: ignore[arg-type]  # Decoding checks it
            blocks=self.unmasking_blocks,
            temperature=temperature,
            guidance=self.guidance,
            remasking=self.remasking,  # type: ignore[arg-type]
            end_start=self.end_confidence_start,
            end_stop=self.end_confidence_stop,
            end_index=self.end_confidence_index,  # type: ignore[arg-type]
        )


MASKED_OPTIONS = frozenset(f.name for f in fields(MaskedOptions))
"""Names of the options. A method that sets one of them needs a trainer that has them."""
