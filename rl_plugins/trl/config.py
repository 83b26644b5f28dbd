"""TRL's `GRPOConfig` with further words: methods, their parameters, limits, precision of rollouts, costs, the trace."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import trl
from transformers import TrainerCallback
from transformers import trainer as hf_trainer

from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime import registry
from rl_plugins.runtime.cheap import PRECISIONS
from rl_plugins.runtime.reward_errors import HELP, STOP, check_on_reward_error
from rl_plugins.runtime.stack import MAX_UNREWARDED_BATCHES, check_max_unrewarded_batches
from rl_plugins.runtime.trace import trace_of


@dataclass
class GRPOConfig(trl.GRPOConfig):
    """`trl.GRPOConfig` that names methods of rl-plugins.

    Args:
        methods: names of methods, in the order in which they act, e.g. `[vade, mc_grpo]`. Empty: plain TRL.
        method_params: parameters, e.g. `{"mc_grpo": {"mad_eps": 1e-3}}`; on a command line as JSON text.
        max_unrewarded_batches: with methods: generation batches in a row in which no completion may have a reward
            (every reward function returned None or NaN: a service is down). They are skipped: no optimizer step, no
            hook after `rewards`. One more ends the run. 0: the first one does.
        on_reward_error: with methods: "stop", an exception of a reward function ends the run, as in TRL; or "mask", the
            function is asked about each completion alone, and where it raises the completion has no reward of it.
        rollout_cache_gb: with methods that make rollouts by a program on `transformers` (no vLLM): GB (1e9 bytes) of
            keys and values kept between its requests, so that contexts are not read again. 0: none. They are given
            back when the rollouts are made.
        rollout_precision: with methods and transformers' `generate`: "policy", or a copy of the policy makes the
            rollouts of training, in "bf16", "int8" or "fp4" (`rl_plugins.runtime.cheap`). The log-probs of the loss are
            the policy's. Name a method that corrects for the copy, such as `dart_tis`.
        count_costs: without methods: log what the run costs as runs with methods do, see
            `rl_plugins.runtime.costs.Costs`. Nothing else changes.
        accept_changed_checkpoint: resume from a checkpoint whose files were changed, lost or added after it was saved
            with methods, or whose run had another seed. The run says which. Without it the resume is refused.
        trace: true, or options (`rl_plugins.runtime.trace.TraceParams`): write what is generated and what every
            method does with it to the folder `trace` of `output_dir`, with methods and without.

    Attributes:
        has_trainer: a trainer with methods is taking this config.

    Raises:
        ConfigError: `methods` that are no list, `method_params` that are no mapping (the trainer refuses unknown
            methods and parameters, with all else that is wrong), a `rollout_cache_gb` that is negative or not finite,
            a `max_unrewarded_batches` below 0, a `rollout_precision` that is not known or cannot take effect.
    """

    methods: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Methods of rl-plugins, in order, e.g. `--methods vade mc_grpo`. `rl-plugins list` shows "
            "them, `rl-plugins info METHOD` explains one."
        },
    )
    method_params: dict[str, Any] | str | None = field(
        default=None,
        metadata={"help": 'Parameters of the methods, e.g. \'{"mc_grpo": {"mad_eps": 0.001}}\'.'},
    )
    max_unrewarded_batches: int = field(
        default=MAX_UNREWARDED_BATCHES,
        metadata={
            "help": "With methods: batches in a row in which no completion may have a reward. They are skipped; one "
            "more ends the run."
        },
    )
    on_reward_error: str = field(default=STOP, metadata={"help": HELP})
    rollout_cache_gb: float = field(
        default=4.0,
        metadata={
            "help": "GB of keys and values that rollout programs on transformers' generate keep between requests; "
            "0: none, contexts are read again each time."
        },
    )
    rollout_precision: str = field(
        default="policy",
        metadata={
            "help": "With methods: precision of a copy of the policy that makes the rollouts: bf16, int8, fp4; policy: "
            "there is no copy."
        },
    )
    count_costs: bool = field(
        default=False,
        metadata={"help": "Without methods: log tokens, engine calls and rows as runs with methods do."},
    )

    accept_changed_checkpoint: bool = field(
        default=False,
        metadata={"help": "Resume from a checkpoint with methods although its files are not those that were saved."},
    )
    trace: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Write rollouts and every decision about them to OUTPUT_DIR/trace, for `rl-plugins inspect`: true, "
            'or options such as \'{"every": 10, "groups": 16}\'.'
        },
    )

    has_trainer = False  # no field: not an option

    def __post_init__(self) -> None:
        if not 0 <= self.rollout_cache_gb < math.inf:
            raise ConfigError(f"rollout_cache_gb={self.rollout_cache_gb}: give a number of GB, 0 for none.")
        check_on_reward_error(self.on_reward_error, "on_reward_error")
        read_methods(self)
        check_precision(self)
        super().__post_init__()

    def to_dict(self) -> dict[str, Any]:
        return {**super().to_dict(), "method_params": as_names(self.method_params)}

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("methods", "trace") and value:
            refuse_stock_trainers()
        super().__setattr__(name, value)


def as_names(value: Any) -> Any:
    """Parameters as they are logged and saved: a function, a class or another object by its name, module:attribute.
    Some of them cannot be pickled, and no logger takes them."""
    if isinstance(value, Mapping):
        return {key: as_names(v) for key, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_names(v) for v in value]
    if value is None or isinstance(value, (str, int, float)):
        return value
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{named.__module__}:{named.__qualname__}"


def check_precision(config: GRPOConfig) -> None:
    """Refuses a `rollout_precision` that could not take effect, or that nothing would correct for.

    Raises:
        ConfigError: see above.
    """
    given = config.rollout_precision
    if given == "policy":
        return
    if given not in PRECISIONS:
        raise ConfigError(f"rollout_precision={given!r}: allowed are policy, {', '.join(PRECISIONS)}.")
    copied = f"rollout_precision={given} is a copy of the policy for transformers' generate"
    if config.use_vllm:
        raise ConfigError(f"{copied}, and the run has use_vllm=True. Set use_vllm=False, or remove the option.")
    if config.use_transformers_continuous_batching:
        raise ConfigError(
            f"{copied}, and continuous batching reports no log-probs. Set use_transformers_continuous_batching=False."
        )
    if not config.methods:
        raise ConfigError(
            f"{copied}, and no method is named that corrects for it. Add one to `methods`, such as dart_tis, or remove "
            f"the option."
        )


def read_methods(config: Any) -> None:
    """The words `methods`, `method_params` and `max_unrewarded_batches` of a config, as they are used from then on.

    Raises:
        ConfigError: see `GRPOConfig`; before anything expensive happens.
    """
    check_max_unrewarded_batches(config.max_unrewarded_batches, "max_unrewarded_batches")
    config.methods = registry.parse_methods(config.methods)
    config.method_params = registry.parse_method_params(config.method_params)
    trace_of(getattr(config, "trace", None), "trace", "")


class RefuseStockTrainer(TrainerCallback):
    """Stops a trainer of TRL itself that is handed a config naming methods: it would train without them."""

    def on_init_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if getattr(args, "trace", None) and not getattr(args, "has_trainer", False):
            raise ConfigError(
                "The config asks for a `trace`, and the trainer is TRL's own, which would write none. Use `from "
                "rl_plugins.trl import GRPOTrainer`, or `rl-plugins trl grpo` instead of `trl grpo`, or remove `trace`."
            )
        if getattr(args, "methods", None) and not getattr(args, "has_trainer", False):
            raise ConfigError(
                f"The config names the methods {', '.join(args.methods)}, but the trainer is TRL's own, which would "
                f"ignore them. Use `from rl_plugins.trl import GRPOTrainer`, or `rl-plugins trl grpo` instead of "
                f"`trl grpo`, or leave `methods` empty."
            )


def refuse_stock_trainers() -> None:
    """From now on every trainer looks at its config, see `RefuseStockTrainer`."""
    if RefuseStockTrainer not in hf_trainer.DEFAULT_CALLBACKS:
        hf_trainer.DEFAULT_CALLBACKS.append(RefuseStockTrainer)
