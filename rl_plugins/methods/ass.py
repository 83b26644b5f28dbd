"""ASS (arXiv 2509.23924): a masked diffusion model unmasks 1, 2, 4 and more tokens per step."""

from __future__ import annotations

from dataclasses import dataclass

from rl_plugins import Method, MethodParams, Run, from_params, param
from rl_plugins.kit.start_checks import refuse_beyond_completion
from rl_plugins.methods.mdlm import refuse_verl


class Ass(Method):
    """Decodes answers of a masked diffusion model in S = floor(log2 L) steps.

        n_i = 2^i   for i < S - 1,   n_{S-1} = L - (2^{S-1} - 1)

    n_i tokens are unmasked in step i: few while little is known, many once the answer is determined. L is
    `max_completion_length`. With several blocks the answer is decoded from left to right: the last blocks have one step
    each, the first has the steps that are left.

    Raises:
        ConfigError: another trainer than MaskedGRPOTrainer, L below 2, more blocks than steps, or `diffusion_steps`
            that is not S.

    Source: arXiv 2509.23924; get_num_transfer_tokens_ass in eval/generate.py and get_block_sizes in
    cj-grpo/cj_grpo_trainer_eoser_ass.py of yjyddq/EOSER-ASS-RL.
    """

    name = "ass"
    fidelity = "code"
    does = "Unmasks 1, 2, 4 and more tokens per step, so that a masked diffusion model needs log2 L steps"
    problems = ("masked_diffusion",)
    hosts = ("trl",)
    host_options = from_params(lambda p: {"trl": {"unmasking": "ascending", "unmasking_blocks": p.blocks}})

    @dataclass(frozen=True)
    class Params(MethodParams):
        blocks: int = param(1, "blocks of the answer, decoded from the left", ge=1)

    def check(self, run: Run) -> None:
        refuse_verl(self.name, run)
        refuse_beyond_completion(run, "blocks", self.params.blocks, "some blocks have no token")
