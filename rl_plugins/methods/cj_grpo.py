"""CJ-GRPO (arXiv 2509.23924): GRPO of a masked diffusion model on the states its answers went through."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rl_plugins import Method, MethodParams, Run, from_params, param
from rl_plugins.methods.mdlm import refuse_verl


class CjGrpo(Method):
    """Takes every log-prob in the state in which its token was unmasked, instead of in one state for all tokens.

        lp_t   = log pi(y_t | prompt, x^i),   i the step that unmasked token t, x^i the answer before that step
        rho_t  = exp(lp_t - lp_old_t)
        loss   = 1/S sum_i mean_{t in U_i} [ -min(rho_t A, clip(rho_t) A) + beta KL_t ]       (`step_weight: equal`)

    lp_old and the reference's log-probs are taken in the same states. U_i are the tokens of all rows that step i
    unmasked. As every row unmasks n_i tokens in step i, this is the mean over tokens with weights L / (S n_i), KL
    included. `step_weight: tokens` is the plain mean over tokens.

    Without this method log-probs come from one pass over an answer of masks, as in diffu-GRPO. What was sampled and
    what is trained then differ.

    Symbols: S steps, L tokens of an answer (those after the first end token included), A the advantage of the row.

    Special cases: advantages are the host's or another method's. The paper does not divide by the deviation
    (`scale_rewards: none`).

    Raises:
        ConfigError: another trainer than MaskedGRPOTrainer; with `step_weight: equal` a method that changes the loss.

    Source: arXiv 2509.23924; `compute_loss` in cj-grpo/cj_grpo_trainer_*.py of yjyddq/EOSER-ASS-RL.
    """

    name = "cj_grpo"
    fidelity = "code"
    does = "Takes log-probs of a masked diffusion model in the states in which its tokens were unmasked"
    problems = ("masked_diffusion",)
    hosts = ("trl",)
    host_options = from_params(lambda p: {"trl": {"logprobs_from": "trajectory", "step_weight": p.step_weight}})

    @dataclass(frozen=True)
    class Params(MethodParams):
        step_weight: Literal["equal", "tokens"] = param(
            "equal", "equal: every step counts alike (code); tokens: every token counts alike"
        )

    def check(self, run: Run) -> None:
        refuse_verl(self.name, run)
