"""EOSER, ASS and CJ-GRPO (arXiv 2509.23924): the bundle, and what its three methods share."""

from __future__ import annotations

from rl_plugins import Bundle, ConfigError, Run


def refuse_verl(name: str, run: Run) -> None:
    """Raises ConfigError on a host without masked diffusion models."""
    if run.host == "verl":
        raise ConfigError(
            f"`{name}` is for masked diffusion language models, and verl has no engine and no worker for one. Use "
            f"rl_plugins.trl.masked.MaskedGRPOTrainer."
        )


MDLM = Bundle(
    "mdlm",
    parts={"ass": {}, "eoser": {}, "cj_grpo": {}},
    does="Trains masked diffusion language models with few decoding steps, on the states they went through",
    problems=("masked_diffusion",),
)
