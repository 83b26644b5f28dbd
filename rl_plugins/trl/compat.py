"""Which TRL this adapter is tested with, which of its private names it relies on, and which upstream seams exist.

The seams are the small patches in `patches/trl/`. Where the installed TRL has one, the adapter uses it.
"""

from __future__ import annotations

import importlib.metadata
import os
from dataclasses import dataclass
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.runtime.preflight import moved

TESTED = ((1, 16), (1, 17))  # first tested version, first untested one
ALLOW_VARIABLE = "RL_PLUGINS_ALLOW_UNTESTED"

# Methods of GRPOTrainer that the adapter overrides or calls, with their parameters in TRL 1.16.
PINNED: dict[str, tuple[str, ...]] = {
    "_calculate_rewards": ("inputs", "prompts", "completions", "completion_ids_list"),
    "_compute_loss": ("model", "inputs"),
    "_generate": ("prompts",),
    "_generate_and_score_completions": ("inputs",),
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images"),
    "_get_per_token_logps_and_entropies": (
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
    ),
    "_load_optimizer_and_scheduler": ("checkpoint",),
    "_prepare_inputs": ("generation_batch",),
    "_save_checkpoint": ("model", "trial"),
    "get_high_entropy_mask": ("entropies", "mask", "threshold"),
    "get_off_policy_mask": (
        "advantages",
        "per_token_logps",
        "sampling_per_token_logps",
        "mask",
        "off_policy_threshold",
    ),
    "get_train_dataloader": (),
}


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


def moved_symbols(trainer_class: type) -> list[str]:
    """What of the pinned names is gone or takes other parameters; empty if this host is as expected."""
    return moved(trainer_class, PINNED)


@dataclass(frozen=True)
class Seams:
    """Upstream seams of the installed trainer class (True if it has them)."""

    transform_advantages: bool
    transform_per_token_loss: bool
    select_completions: bool

    @classmethod
    def of(cls, host: Any) -> Seams:
        return cls(
            transform_advantages=hasattr(host, "_transform_advantages"),
            transform_per_token_loss=hasattr(host, "_transform_per_token_loss"),
            select_completions=hasattr(host, "_select_completions"),
        )
