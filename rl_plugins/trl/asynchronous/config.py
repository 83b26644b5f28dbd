"""The config of TRL's asynchronous trainer with three more words: methods, their parameters, and a limit."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from trl.experimental import async_grpo

from rl_plugins.core.errors import ConfigError, shown
from rl_plugins.runtime.stack import MAX_UNREWARDED_BATCHES
from rl_plugins.trl.config import as_names, read_methods, refuse_stock_trainers


@dataclass
class AsyncGRPOConfig(async_grpo.AsyncGRPOConfig):
    """`trl.experimental.async_grpo.AsyncGRPOConfig` that names methods of rl-plugins.

    Args:
        methods, method_params, max_unrewarded_batches: as in `rl_plugins.trl.GRPOConfig`. A batch is what one
            optimizer step trains.
        accept_changed_checkpoint: as there.
        trace: of `rl_plugins.trl.GRPOConfig`; refused here.

    Attributes:
        has_trainer: a trainer with methods is taking this config.

    Raises:
        ConfigError: a trace, an unknown method or parameter, parameters of a method that is not enabled, a
            `max_unrewarded_batches` below 0.
    """

    methods: list[str] = field(default_factory=list, metadata={"help": "Methods of rl-plugins, in order."})
    method_params: dict[str, Any] | str | None = field(default=None, metadata={"help": "Parameters of the methods."})
    max_unrewarded_batches: int = field(
        default=MAX_UNREWARDED_BATCHES,
        metadata={"help": "With methods: batches in a row in which no completion may have a reward."},
    )

    accept_changed_checkpoint: bool = field(
        default=False,
        metadata={"help": "Resume from a checkpoint with methods although its files are not those that were saved."},
    )
    trace: Any = field(default=None, metadata={"help": "Not served: this trainer writes no trace."})

    has_trainer = False  # no field: not an option

    def __post_init__(self) -> None:
        if self.trace not in (None, False):
            raise ConfigError(
                f"`trace` is {shown(self.trace)}, and TRL's asynchronous trainer writes no trace. Take "
                f"rl_plugins.trl.GRPOTrainer for it, or leave `trace` out."
            )
        read_methods(self)
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "method_params": as_names(self.method_params)}

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "methods" and value:
            refuse_stock_trainers()
        super().__setattr__(name, value)
