"""`GRPOConfig` of a masked diffusion language model."""

from __future__ import annotations

from dataclasses import dataclass

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.kit.masked import MaskedOptions
from rl_plugins.trl.config import GRPOConfig

_NEUTRAL = {
    "use_vllm": (False, "vLLM decodes from left to right"),
    "use_transformers_continuous_batching": (False, "it decodes from left to right"),
    "cache_implementation": (None, "there are no keys and values to keep"),
    "generation_kwargs": (None, "it is no option of `generate`"),
    "top_p": (1.0, "tokens are drawn from the whole distribution"),
    "top_k": (0, "tokens are drawn from the whole distribution"),
    "min_p": (None, "tokens are drawn from the whole distribution"),
    "repetition_penalty": (1.0, "tokens are drawn from the whole distribution"),
    "mask_truncated_completions": (False, "every answer has the same length"),
    "cast_lm_head_to_fp32": (False, "log-probs are computed in float32 from the logits of the whole model"),
    "rollout_precision": ("policy", "copies are made for transformers' generate"),
    "use_liger_kernel": (False, "it replaces the forward pass of the model"),
}
"""Options of TRL that act on decoding from left to right: their neutral values, and why no other is taken."""
_PLAIN_TOKENS = {
    "top_entropy_quantile": "it compares entropies after they are multiplied by the weights",
    "loss_type": "the ratio of a row is a product over its tokens, and weighted tokens give another one",
}
"""Options of TRL that are wrong on weighted tokens, and why."""


@dataclass
class MaskedGRPOConfig(MaskedOptions, GRPOConfig):
    """`rl_plugins.trl.GRPOConfig` of a model that unmasks tokens in any order.

    `max_completion_length` is L, the length of every answer, and `temperature` that of the noise in decoding.

    Args:
        mask_token_id, diffusion_steps, unmasking, unmasking_blocks, guidance, remasking, end_confidence_start,
        end_confidence_stop, end_confidence_index, logprobs_from, prompt_masking, step_weight, recompute_states: see
            `rl_plugins.kit.masked.MaskedOptions`.

    Raises:
        ConfigError: as `GRPOConfig`, and for options of TRL that this kind of decoding does not have.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        problems = [
            f"{name}={shown(getattr(self, name))} has no meaning for a masked diffusion model: {why}. Leave it out."
            for name, (neutral, why) in _NEUTRAL.items()
            if getattr(self, name) != neutral and getattr(self, name)
        ]
        for name, allowed in (("logprobs_from", ("one_step", "trajectory")), ("step_weight", ("tokens", "equal"))):
            if getattr(self, name) not in allowed:
                problems.append(f"{name}={shown(getattr(self, name))}: allowed are {' and '.join(allowed)}.")
        if not 0 <= self.prompt_masking < 1:
            problems.append(f"prompt_masking={self.prompt_masking}: give a chance from 0 to below 1.")
        if problems:
            raise ConfigError("\n".join(problems))

    def check_masked(self) -> None:
        """Values that may be set by methods.

        Raises:
            ConfigError: they do not fit each other.
        """
        self.decoding(self.max_completion_length, self.temperature)
        if self.logprobs_from == "one_step" and self.step_weight == "equal":
            raise ConfigError(
                "step_weight='equal' weighs the steps in which tokens were unmasked, and with "
                "logprobs_from='one_step' there is one step. Set logprobs_from='trajectory' (the method `cj_grpo` "
                "does), or step_weight='tokens'."
            )
        plain = {"top_entropy_quantile": self.top_entropy_quantile < 1, "loss_type": self.loss_type == "vespo"}
        for name in [name for name, given in plain.items() if given and self.step_weight == "equal"]:
            raise ConfigError(
                f"{name}={shown(getattr(self, name))} cannot be combined with step_weight='equal': "
                f"{_PLAIN_TOKENS[name]}. Set step_weight='tokens' (of the method `cj_grpo`, if it is named), or leave "
                f"{name} out."
            )
        if self.logprobs_from == "one_step" and self.recompute_states:
            raise ConfigError("recompute_states acts with logprobs_from='trajectory' only. Set that, or remove it.")
