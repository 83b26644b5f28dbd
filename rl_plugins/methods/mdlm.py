"""EOSER, ASS and CJ-GRPO (arXiv 2509.23924): the bundle, and what its three methods share."""

from __future__ import annotations

from rl_plugins.errors import ConfigError
from rl_plugins.method import Bundle, Measured, Paper
from rl_plugins.rollouts import Run

PAPER = Paper(
    arxiv="2509.23924",
    title="Taming Masked Diffusion Language Models via Consistency Trajectory Reinforcement Learning with Fewer "
    "Decoding Step",
    authors="Jingyi Yang and others",
    year=2025,
    code="yjyddq/EOSER-ASS-RL",
)
PAPER_SETTINGS = {
    "trl": {
        "scale_rewards": "none",
        "beta": 0.04,
        "use_bias_correction_kl": False,
        "epsilon": 0.5,
        "num_iterations": 12,
        "num_generations": 6,
        "temperature": 1.0,
        "learning_rate": 3e-6,
    }
}
"""Of the authors' scripts for GSM8K and MATH; 8 iterations for countdown and sudoku."""


def refuse_verl(name: str, run: Run) -> None:
    """Raises ConfigError on a host without masked diffusion models."""
    if run.host == "verl":
        raise ConfigError(
            f"`{name}` is for masked diffusion language models, and verl has no engine and no worker for one. Use "
            f"rl_plugins.trl.masked.MaskedGRPOTrainer."
        )


MDLM = Bundle(
    name="mdlm",
    parts={"ass": {}, "eoser": {}, "cj_grpo": {}},
    paper=PAPER,
    about=(
        "For masked diffusion language models, in `rl_plugins.trl.masked.MaskedGRPOTrainer`. Answers are decoded in "
        "floor(log2 L) steps of 1, 2, 4 and more tokens (`ass`). The confidence of end tokens is held back at first "
        "(`eoser`). Every log-prob is taken in the state in which its token was unmasked (`cj_grpo`)."
    ),
    does="Trains masked diffusion language models with few decoding steps, on the states they went through",
    problems=("masked_diffusion",),
    measured=(
        Measured(
            "right answers after 36 steps minus those of one-step log-probs, 3 passes each (toy)",
            "better",
            "+0.081 ± 0.054",
            "mdlm-5-seeds",
        ),
        Measured(
            "right answers after 36 steps minus those of eoser and cj_grpo in 3 uniform passes (toy)",
            "not told apart",
            "-0.057 ± 0.100",
            "mdlm-5-seeds",
        ),
    ),
    paper_settings=PAPER_SETTINGS,
)
