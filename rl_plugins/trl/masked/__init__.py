"""GRPO of masked diffusion language models in TRL.

from rl_plugins.trl.masked import MaskedGRPOConfig, MaskedGRPOTrainer
"""

from __future__ import annotations

from rl_plugins.trl.masked.config import MaskedGRPOConfig
from rl_plugins.trl.masked.trainer import MaskedGRPOTrainer

__all__ = ["MaskedGRPOConfig", "MaskedGRPOTrainer"]
