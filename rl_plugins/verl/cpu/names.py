"""Our names in verl's registries of platforms, rollout backends and weight transfers. A name that is taken stays as it
is."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.verl.cpu import CHECKPOINT_ENGINE, ROLLOUT
from rl_plugins.verl.imports import after_import

ADAPTER = "rl_plugins.verl.cpu.rollout.ServerAdapter"


def free(present: Any, mine: Any, name: str, what: str) -> bool:
    """Whether a name is still free; False if it is ours already.

    Raises:
        ConfigError: something else has the name.
    """
    if present is None or present == mine:
        return present is None
    raise ConfigError(
        f"rl-plugins cannot register {name!r} as {what} in verl, because {_shown(present)} has that name already, and "
        "only one of them can serve VERL_PLATFORM=cpu. Unload the other plugin, for example with "
        "VERL_USE_EXTERNAL_PLUGINS=rl_plugins, or unset VERL_PLATFORM to run without ours."
    )


def place() -> None:
    """Registers each name as soon as the module with its registry was imported."""
    after_import("verl.workers.rollout.replica", _replica)
    after_import("verl.workers.rollout.base", _adapter)
    after_import("verl.checkpoint_engine.base", _checkpoint_engine)


def _replica(module: ModuleType) -> None:
    registry = module.RolloutReplicaRegistry
    try:
        present = registry.get(ROLLOUT)
    except ValueError:  # what verl says of a name it does not know
        registry.register(ROLLOUT, _load_replica)  # would overwrite without a word (replica.py:312)
    else:
        free(present, _load_replica(), ROLLOUT, "a rollout backend")


def _load_replica() -> Any:
    from rl_plugins.verl.cpu.rollout import Replica

    return Replica


def _adapter(module: ModuleType) -> None:
    # The trainer's side of a backend has no registering function at all (verl/workers/rollout/base.py:89).
    registry = module._ROLLOUT_REGISTRY
    if free(registry.get((ROLLOUT, "async")), ADAPTER, ROLLOUT, "a rollout backend"):
        registry[ROLLOUT, "async"] = ADAPTER


def _checkpoint_engine(module: ModuleType) -> None:
    from rl_plugins.verl.cpu.weights import FileCheckpointEngine

    registry = module.CheckpointEngineRegistry
    try:
        present = registry.get(CHECKPOINT_ENGINE)
    except ValueError:
        registry.register(CHECKPOINT_ENGINE)(FileCheckpointEngine)
    else:
        free(present, FileCheckpointEngine, CHECKPOINT_ENGINE, "a checkpoint engine")


def _shown(thing: Any) -> str:
    module = getattr(thing, "__module__", None)
    return f"{module}.{getattr(thing, '__qualname__', thing)}" if module else repr(thing)
