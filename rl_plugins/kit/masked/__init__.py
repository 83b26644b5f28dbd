"""Masked diffusion language models: how they decode, and log-probs in the states in which tokens were unmasked."""

from rl_plugins.kit.masked.decoding import Decoded, Decoding, decode, end_factor, scaled_confidence
from rl_plugins.kit.masked.options import MASKED_OPTIONS, MaskedOptions
from rl_plugins.kit.masked.schedules import ascending_blocks, ascending_schedule, uniform_schedule
from rl_plugins.kit.masked.states import state_at, step_weights, trajectory_logprobs

__all__ = [
    "MASKED_OPTIONS",
    "Decoded",
    "Decoding",
    "MaskedOptions",
    "ascending_blocks",
    "ascending_schedule",
    "decode",
    "end_factor",
    "scaled_confidence",
    "state_at",
    "step_weights",
    "trajectory_logprobs",
    "uniform_schedule",
]
