"""Methods in TRL's asynchronous trainer (`trl.experimental.async_grpo`).

from rl_plugins.trl.asynchronous import AsyncGRPOConfig, AsyncGRPOTrainer   # the only change in a script
"""

from __future__ import annotations

from rl_plugins.trl.asynchronous.config import AsyncGRPOConfig
from rl_plugins.trl.asynchronous.trainer import AsyncGRPOTrainer, AsyncMethodsMixin
from rl_plugins.trl.asynchronous.worker import GenerateWorker

__all__ = ["AsyncGRPOConfig", "AsyncGRPOTrainer", "AsyncMethodsMixin", "GenerateWorker"]
