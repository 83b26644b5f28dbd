"""The diffusion adapter: a trainer for flow-matching models of diffusers with `methods` and `method_params`.

from rl_plugins.diffusion import DiffusionConfig, DiffusionTrainer
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rl_plugins.diffusion.config import DiffusionConfig
    from rl_plugins.diffusion.trainer import DiffusionTrainer

__all__ = ["DiffusionConfig", "DiffusionTrainer"]


def __getattr__(name: str) -> Any:
    """Loads diffusers only where the trainer is asked for."""
    if name == "DiffusionConfig":
        from rl_plugins.diffusion.config import DiffusionConfig

        return DiffusionConfig
    if name == "DiffusionTrainer":
        from rl_plugins.diffusion.trainer import DiffusionTrainer

        return DiffusionTrainer
    raise AttributeError(f"module 'rl_plugins.diffusion' has no attribute {name!r}")
