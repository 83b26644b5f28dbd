"""Which TRL this adapter is tested with, which of its names it relies on, and which upstream seams exist.

The seams are the small patches in `patches/trl/`. Where the installed TRL has one, the adapter uses it.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

from rl_plugins.core.errors import ConfigError
from rl_plugins.runtime.host_names import Pinned

TESTED = ((1, 16), (1, 17))  # first tested version, first untested one
ALLOW_VARIABLE = "RL_PLUGINS_ALLOW_UNTESTED"

_TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
_ASYNC = "trl.experimental.async_grpo"
ASYNC_TRAINER = f"{_ASYNC}.async_grpo_trainer:AsyncGRPOTrainer"
_SFT = "trl.trainer.sft_trainer:SFTTrainer"

PINNED = (
    Pinned(
        _TRAINER,
        "_generate_and_score_completions",
        ("inputs",),
        "overridden: the plan before it, the decision after it",
    ),
    Pinned(_TRAINER, "_generate", ("prompts",), "overridden: keeps what it returned; called once per round"),
    Pinned(
        _TRAINER,
        "_generate_single_turn",
        ("prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
        "overridden: serves the rows of the plan; the engine of rollout programs",
    ),
    Pinned(
        _TRAINER,
        "_calculate_rewards",
        ("inputs", "prompts", "completions", "completion_ids_list"),
        "overridden: fillers have no reward; called once per round and by programs",
    ),
    Pinned(_TRAINER, "_tokenize_prompts", ("prompts",), "called: contexts of rollout programs are TRL's own"),
    Pinned(
        _TRAINER,
        "_get_per_token_logps_and_entropies",
        ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy"),
        "overridden: the log-probs TRL's loss is made of; called for signals TRL does not compute",
    ),
    Pinned(
        _TRAINER,
        "_set_signature_columns_if_needed",
        (),
        "overridden: the number of a row is a column TRL must not drop",
    ),
    Pinned(_TRAINER, "_dist", None, "read: parameters are whole while a masked diffusion model decodes"),
    Pinned(_TRAINER, "_signature_columns", None, "extended by that column"),
    Pinned(_TRAINER, "_step", None, "read: micro-batches so far, which tell where a batch and an optimizer step end"),
    Pinned(_TRAINER, "_buffered_inputs", None, "read: micro-batches of the coming optimizer step; columns are added"),
    Pinned(_TRAINER, "_metrics", None, "changed: what TRL logs of rows it did not choose"),
    Pinned(_TRAINER, "_logs", None, "changed: the table of completions"),
    Pinned(_TRAINER, "_pending_extra_logs", None, "changed: columns that reward functions add to that table"),
    Pinned(_TRAINER, "_transform_advantages", ("advantages",), "overridden: seam T2", optional=True),
    Pinned(
        _TRAINER,
        "_transform_per_token_loss",
        ("per_token_loss", "per_token_logps", "log_ratio", "mask", "inputs"),
        "overridden: seam T3",
        optional=True,
    ),
    Pinned(_TRAINER, "_select_completions", None, "looked for: seam T5", optional=True),
    Pinned(_TRAINER, "training_step", ("model", "inputs", "num_items_in_batch"), "overridden: the gradient is finite"),
    Pinned(_TRAINER, "compute_loss", ("model", "inputs"), "overridden: `before_update` before it, the surrogate in it"),
    Pinned(_TRAINER, "get_high_entropy_mask", ("entropies", "mask", "threshold"), "overridden: seen by the loss"),
    Pinned(
        _TRAINER,
        "get_off_policy_mask",
        ("advantages", "per_token_logps", "sampling_per_token_logps", "mask", "off_policy_threshold"),
        "called: the factor TRL puts on its own surrogate",
    ),
    Pinned(_TRAINER, "get_train_dataloader", (), "overridden: rows with their number"),
    Pinned(_TRAINER, "train", ("resume_from_checkpoint",), "overridden: which checkpoint the state comes from"),
    Pinned(_TRAINER, "save_model", ("output_dir",), "overridden: TRL writes each checkpoint with it first"),
    Pinned(
        _TRAINER,
        "_save_rng_state",
        ("output_dir",),
        "overridden: the last file of a checkpoint but for the one that says it is whole; the state is written then",
    ),
    Pinned(ASYNC_TRAINER, "get_train_dataloader", (), "overridden: the driver stands before TRL's batcher in it"),
    Pinned(ASYNC_TRAINER, "rollout_queue", None, "changed while the dataloader is made: its samples are seen whole"),
    Pinned(ASYNC_TRAINER, "get_batch_samples", ("epoch_iterator", "num_batches", "device"), "overridden: one step"),
    Pinned(ASYNC_TRAINER, "compute_loss", ("model", "inputs"), "overridden: the surrogate in it"),
    Pinned(ASYNC_TRAINER, "model_version", None, "read: the number of the newest published weights"),
    Pinned(
        f"{_ASYNC}.async_grpo_trainer:FixedCountBatcher",
        "__init__",
        ("dataset", "num_processes", "microbatch_size"),
        "called with the driver as its dataset",
    ),
    Pinned(f"{_ASYNC}.async_grpo_trainer:DataCollatorForRollout", "torch_call", ("examples",), "overridden: columns"),
    Pinned(f"{_ASYNC}.packing", "_flash_attn", (), "replaced on a CPU"),
    Pinned(f"{_ASYNC}.async_rollout_worker:AsyncRolloutWorker", "_loop_kwargs", None, "read: the first prompt"),
    Pinned(f"{_ASYNC}.async_rollout_worker", "_AsyncRolloutLoop", None, "its way to score a group, for our worker"),
    Pinned(
        f"{_ASYNC}.async_rollout_worker:_AsyncRolloutLoop",
        "_score_group",
        ("group",),
        "called: rewards and advantages of our worker's groups are TRL's own",
    ),
    Pinned(
        f"{_ASYNC}.async_rollout_worker:_AsyncRolloutLoop", "_env_reward_types", None, "given to that: no environments"
    ),
    Pinned(
        f"{_ASYNC}.async_rollout_worker:_AsyncRolloutLoop", "_provides_rollout_reward", None, "given to that: False"
    ),
    Pinned(
        "trl.trainer.utils",
        "_ChunkedLogProbFunction",
        None,
        "replaced while the loss of `otr` is computed: the fused head gives its loss instead of log-probs",
    ),
    Pinned("trl.trainer.utils", "_use_triton", ("device",), "replaced with it: the head hands over targets alone"),
    Pinned(
        _SFT, "get_batch_samples", ("epoch_iterator", "num_batches", "device"), "overridden: counts sequences for `otr`"
    ),
    Pinned(_SFT, "_metrics", None, "extended: what `otr` logs"),
    Pinned(_SFT, "compute_loss", ("model", "inputs"), "overridden: the head is replaced in it"),
    Pinned(
        "transformers.generation.utils:GenerationMixin",
        "_supports_default_dynamic_cache",
        (),
        "called: whether keys and values of a model can be kept",
    ),
    Pinned(
        "argparse:ArgumentParser", "_option_string_actions", None, "read: options of TRL's and accelerate's parsers"
    ),
)


def trl_version() -> str:
    return importlib.metadata.version("trl")


def check_trl_version() -> None:
    """Raises ConfigError if TRL is missing or of a version this adapter was not tested with."""
    low, high = (".".join(map(str, v)) for v in TESTED)
    try:
        version = trl_version()
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f'TRL is not installed. Install it with: pip install "rl-plugins[trl]" (TRL >={low},<{high}).'
        ) from None
    number = tuple(int(x) for x in version.split(".")[:2])
    if not TESTED[0] <= number < TESTED[1] and not os.environ.get(ALLOW_VARIABLE):
        raise ConfigError(
            f"TRL {version} is installed; this version of rl-plugins is tested with TRL >={low},<{high}. Install one "
            f"of those (pip install 'trl>={low},<{high}'), or set {ALLOW_VARIABLE}=1 to try."
        )


def moved_symbols(trainer_class: type | None = None, owner: str = _TRAINER) -> list[str]:
    """What of the pinned names is gone or takes other parameters; empty if this host is as expected.

    Args:
        trainer_class: the trainer that is extended; None: TRL's own, and everything else that is used.
        owner: the trainer of TRL that it is, as `Pinned.owner`.
    """
    names = [p for p in PINNED if trainer_class is None or p.owner == owner]
    return [text for p in names if (text := p.moved(trainer_class))]


@dataclass(frozen=True)
class Seams:
    """Upstream seams of the installed trainer class (True if it has them)."""

    transform_per_token_loss: bool
    select_completions: bool

    @classmethod
    def of(cls, host: Any) -> Seams:
        return cls(
            transform_per_token_loss=hasattr(host, "_transform_per_token_loss"),
            select_completions=hasattr(host, "_select_completions"),
        )
