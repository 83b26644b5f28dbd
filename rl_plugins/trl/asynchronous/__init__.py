"""Methods in TRL's asynchronous trainer (`trl.experimental.async_grpo`).

from rl_plugins.trl.asynchronous import AsyncGRPOConfig, AsyncGRPOTrainer   # the only change in a script
"""

from __future__ import annotations

from rl_plugins.trl.compat import ASYNCHRONOUS, check_part

check_part(ASYNCHRONOUS)

from rl_plugins.trl.asynchronous.config import AsyncGRPOConfig  # noqa: E402
from rl_plugins.trl.asynchronous.trainer import AsyncGRPOTrainer, AsyncMethodsMixin  # noqa: E402
from rl_plugins.trl.asynchronous.worker import GenerateWorker  # noqa: E402

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "AsyncMethodsMixin", "GenerateWorker"]
