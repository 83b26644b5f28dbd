"""Objectives by the name that a config gives."""

from __future__ import annotations

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.diffusion.config import DiffusionConfig
from rl_plugins.diffusion.nft import DiffusionNft
from rl_plugins.diffusion.objective import ClippedPPO, Objective

OBJECTIVES: dict[str, type[Objective]] = {c.name: c for c in (ClippedPPO, DiffusionNft)}


def objective_of(config: DiffusionConfig) -> type[Objective]:
    """The class that a config names.

    Raises:
        ConfigError: there is none of this name.
    """
    if config.objective not in OBJECTIVES:
        raise ConfigError(f"objective={shown(config.objective)} is given; allowed: {', '.join(OBJECTIVES)}.")
    return OBJECTIVES[config.objective]
