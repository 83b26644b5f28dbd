"""EOSER (arXiv 2509.23924): a masked diffusion model holds end tokens back in its first steps."""

from __future__ import annotations

from dataclasses import dataclass

from rl_plugins import Method, MethodParams, Run, from_params, param
from rl_plugins.methods.mdlm import refuse_verl


class Eoser(Method):
    """Multiplies the confidence of places that hold the end token by a factor that grows to 1 over the steps.

        uniform     f_i = start + (stop - start) i / (S - 1)
        ascending   f_i = start + (stop - start) (2^(i+1) - 1) / 2^S     (with `ass`)

    A masked diffusion model is surest of end tokens, so decoding all places at once fills the answer with them first
    and leaves few places for the text. Which token a place gets is unchanged; places with end tokens are unmasked
    later.

    Symbols: i the step from 0, S the number of steps.

    Raises:
        ConfigError: another trainer than MaskedGRPOTrainer.

    Source: arXiv 2509.23924; `sampling` and `ass_sampling` in cj-grpo/cj_grpo_trainer_*.py of yjyddq/EOSER-ASS-RL.
    """

    name = "eoser"
    fidelity = "code"
    does = "Holds back end tokens in the first decoding steps of a masked diffusion model"
    problems = ("masked_diffusion",)
    hosts = ("trl",)
    host_options = from_params(
        lambda p: {
            "trl": {
                "end_confidence_start": p.start,
                "end_confidence_stop": p.stop,
                "end_confidence_index": "block" if p.code_compat else "decoding",
            }
        }
    )

    @dataclass(frozen=True)
    class Params(MethodParams):
        start: float = param(0.01, "gamma_min, factor in the first step", ge=0, le=1)
        stop: float = param(1.0, "gamma_max, factor in the last step", ge=0, le=1)
        code_compat: bool = param(False, "step inside the block instead of the whole decoding, as in the authors' code")

    def check(self, run: Run) -> None:
        refuse_verl(self.name, run)
