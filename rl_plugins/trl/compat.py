"""Which TRL this adapter is tested with, which of its names it relies on, and which upstream seams exist.

The seams are the small patches in `patches/trl/`. Where the installed TRL has one, the adapter uses it.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.runtime.report import TESTED, Private, package_state

ALLOW_VARIABLE = "RL_PLUGINS_ALLOW_UNTESTED"

_TRAINER = "trl.trainer.grpo_trainer:GRPOTrainer"
_LOGITS = ("model", "input_ids", "attention_mask", "logits_to_keep", "batch_size", "compute_entropy")
_OFF_POLICY = ("advantages", "per_token_logps", "sampling_per_token_logps", "mask", "off_policy_threshold")
_TURN = ("prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images")
_REWARDS = ("inputs", "prompts", "completions", "completion_ids_list")
_TERMS = ("per_token_loss", "per_token_logps", "log_ratio", "mask", "inputs")

PRIVATE = (
    Private(
        _TRAINER, "_generate_and_score_completions", ("inputs",), "overridden: the plan before, the decision after"
    ),
    Private(_TRAINER, "_generate", ("prompts",), "overridden: keeps what it returned; called once per round"),
    Private(_TRAINER, "_generate_single_turn", _TURN, "overridden: serves the rows of the plan; engine of programs"),
    Private(_TRAINER, "_calculate_rewards", _REWARDS, "overridden: fillers have none; called per round, by programs"),
    Private(_TRAINER, "_tokenize_prompts", ("prompts",), "called: contexts of rollout programs are TRL's own"),
    Private(_TRAINER, "_get_per_token_logps_and_entropies", _LOGITS, "overridden: what the loss is made of; called"),
    Private(_TRAINER, "_set_signature_columns_if_needed", (), "overridden: a row's number is a column to keep"),
    Private(_TRAINER, "_signature_columns", None, "extended by that column"),
    Private(_TRAINER, "_step", None, "read: micro-batches so far tell where a batch and an optimizer step end"),
    Private(_TRAINER, "_buffered_inputs", None, "read: micro-batches of the coming optimizer step; columns are added"),
    Private(_TRAINER, "_metrics", None, "changed: what TRL logs of rows it did not choose"),
    Private(_TRAINER, "_logs", None, "changed: the table of completions"),
    Private(_TRAINER, "_pending_extra_logs", None, "changed: columns that reward functions add to that table"),
    Private(_TRAINER, "_transform_advantages", ("advantages",), "overridden: seam T2", optional=True),
    Private(_TRAINER, "_transform_per_token_loss", _TERMS, "overridden: seam T3", optional=True),
    Private(_TRAINER, "_select_completions", None, "looked for: seam T5", optional=True),
    Private(
        _TRAINER, "compute_loss", ("model", "inputs"), "overridden: `before_update` before it, the surrogate in it"
    ),
    Private(_TRAINER, "get_high_entropy_mask", ("entropies", "mask", "threshold"), "overridden: seen by our loss"),
    Private(_TRAINER, "get_off_policy_mask", _OFF_POLICY, "called: the factor TRL puts on its own surrogate"),
    Private(_TRAINER, "get_train_dataloader", (), "overridden: rows with their number"),
    Private(_TRAINER, "train", ("resume_from_checkpoint",), "overridden: which checkpoint the state comes from"),
    Private(_TRAINER, "save_model", ("output_dir",), "overridden: TRL begins each checkpoint with it"),
    Private("transformers:GenerationMixin", "_supports_default_dynamic_cache", (), "called: whether a cache is known"),
    Private("argparse:ArgumentParser", "_option_string_actions", None, "read: options of TRL's and accelerate's"),
)


def trl_version() -> str:
    return importlib.metadata.version("trl")


def check_trl_version() -> None:
    """Raises ConfigError if TRL is missing or of a version this adapter was not tested with."""
    low, high = TESTED["trl"]
    version, state = package_state("trl")
    if state == "missing":
        raise ConfigError(f'TRL is not installed. Install it: pip install "rl-plugins[trl]" (TRL >={low},<{high}).')
    if state != "ok" and not os.environ.get(ALLOW_VARIABLE):
        raise ConfigError(
            f"TRL {version} is installed; this version of rl-plugins is tested with TRL >={low},<{high}. Install one "
            f"of those (pip install 'trl>={low},<{high}'), or set {ALLOW_VARIABLE}=1 to try."
        )


def moved_symbols(trainer_class: type | None = None) -> list[str]:
    """What of the table is gone or takes other parameters; empty if this host is as expected.

    Args:
        trainer_class: the trainer that is extended; None: TRL's own, and everything else that is used.
    """
    names = [p for p in PRIVATE if trainer_class is None or p.owner == _TRAINER]
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
