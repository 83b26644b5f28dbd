"""Which verl this adapter is tested with, which of its private names it relies on, and which upstream seams exist.

The seams are the small patches in `patches/verl/`. Where the installed verl has one, the adapter uses it.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.runtime.preflight import moved

TESTED = ((0, 9, 1), (0, 10, 0))  # first tested version, first untested one
ALLOW_VARIABLE = "RL_PLUGINS_ALLOW_UNTESTED"

# Methods of verl's trainers that the adapter overrides or calls, with their parameters in verl 0.9.1.
PINNED: dict[str, tuple[str, ...]] = {
    "_init_dataloader": (),
    "_load_checkpoint": (),
    "_save_checkpoint": (),
    "fit": ("agent_loop_manager",),
    "step": ("metrics", "timing_raw"),
    "_validate": (),
    "_next_train_batch": ("num_prompts",),
    "_submit_batch_to_rollout": ("batch",),
    "_get_required_batch_multiple": ("dp_size",),
    "_balance_batch": ("batch", "metrics"),
    "_compute_old_log_prob": ("batch", "metrics"),
    "_compute_advantage": ("batch", "metrics"),
    "_update_actor": ("batch", "metrics"),
}


# The same of verl's agent-loop worker, which only runs with rollout programs derive from.
WORKER_PINNED: dict[str, tuple[str, ...]] = {
    "_run_prompt": ("prompt", "sampling_params", "trajectory", "trace"),
    "_run_agent_loop": ("sampling_params", "trajectory"),
    "_agent_loop_postprocess": ("output", "validate"),
    "_compute_score": ("outputs", "kwargs"),
}


def verl_version() -> str:
    return importlib.metadata.version("verl")


def untested_allowed() -> bool:
    return bool(os.environ.get(ALLOW_VARIABLE))


def check_verl_version() -> None:
    """Raises ConfigError if verl is missing or of a version this adapter was not tested with."""
    low, high = (".".join(map(str, v)) for v in TESTED)
    try:
        version = verl_version()
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(
            f'verl is not installed. Install it with: pip install "rl-plugins[verl]" (verl >={low},<{high}).'
        ) from None
    number = tuple(int(x) for x in version.split("+")[0].split(".")[:3] if x.isdigit())
    if not TESTED[0] <= number < TESTED[1] and not untested_allowed():
        raise ConfigError(
            f"verl {version} is installed; this version of rl-plugins is tested with verl >={low},<{high}. Install one "
            f"of those (pip install 'verl>={low},<{high}'), or set {ALLOW_VARIABLE}=1 to try."
        )


def moved_symbols(trainer_class: type) -> list[str]:
    """What of the pinned names is gone or takes other parameters; empty if this host is as expected."""
    return moved(trainer_class, PINNED)


def moved_worker_symbols(worker_class: type) -> list[str]:
    """The same of verl's agent-loop worker."""
    return moved(worker_class, WORKER_PINNED)


def states_its_mode(trainer_class: Any) -> bool:
    """Seam V9: trainers say which mode they follow, whatever name they are registered under."""
    return hasattr(trainer_class, "base_mode")


def passes_extra_fields(policy_loss_config: Any) -> bool:
    """Seam V12: `ppo_loss` hands extra columns to the policy loss."""
    return hasattr(policy_loss_config, "extra_fields")
