"""The TRL adapter: `GRPOConfig` and `GRPOTrainer` that take `methods` and `method_params`.

from rl_plugins.trl import GRPOConfig, GRPOTrainer   # the only change in a script
"""

from __future__ import annotations

from rl_plugins.trl.compat import check_versions

check_versions()

from rl_plugins.trl.config import GRPOConfig  # noqa: E402
from rl_plugins.trl.generation.environments import as_tools  # noqa: E402
from rl_plugins.trl.trainer import GRPOTrainer, MethodsMixin  # noqa: E402

__all__ = ["GRPOConfig", "GRPOTrainer", "MethodsMixin", "as_tools"]
