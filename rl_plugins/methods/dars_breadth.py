"""Breadth of DARS-B (arXiv 2508.13755): one optimizer step per pass over the whole batch."""

from __future__ import annotations

from dataclasses import dataclass

from rl_plugins import Method, MethodParams, from_params, param
from rl_plugins.core.method import SameAs

_ACTOR = "actor_rollout_ref.actor"


class DarsBreadth(Method):
    """Trains the whole batch in one optimizer step, several times over, instead of mini-batches.

    For pass 1 .. `passes`, with old log-probs and advantages from the start of the batch:

        loss  = 1/rows sum_i 1/L sum_t ppo_clip_it            over all rows of the batch, L the length limit
        theta <- optimizer step on loss

    The method sets a few options of the host. The divisor is a constant, so long completions are not discounted.
    Breadth is the size of the batch, which you choose: the authors have 3072 prompts of 8 rollouts.

    Symbols: L is max_completion_length (TRL), data.max_response_length (verl).

    Raises:
        ConfigError: the config has other values of these options.

    Source: arXiv 2508.13755; `ppo_mini_batch_size`, `ppo_epochs`, and the loss of the authors' scripts and code at
    9b21b714.
    """

    name = "dars_breadth"
    fidelity = "code"
    does = "Trains the whole batch in one optimizer step per pass, with several passes"
    problems = ("exploration",)
    host_options = from_params(
        lambda p: {
            "trl": {
                "num_iterations": p.passes,
                "steps_per_generation": SameAs("gradient_accumulation_steps"),
                "loss_type": "dr_grpo",
            },
            "verl": {
                f"{_ACTOR}.ppo_epochs": p.passes,
                f"{_ACTOR}.ppo_mini_batch_size": SameAs("data.train_batch_size"),
                f"{_ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
                f"{_ACTOR}.loss_scale_factor": SameAs("data.max_response_length"),
            },
        }
    )

    @dataclass(frozen=True)
    class Params(MethodParams):
        passes: int = param(2, "number of optimizer steps on one batch", ge=1)
