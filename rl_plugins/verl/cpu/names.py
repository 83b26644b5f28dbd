"""Our names in verl's registries of rollout backends and weight transfers. A name that is taken stays as it is."""

from __future__ import annotations

import importlib
from collections.abc import MutableMapping
from types import ModuleType
from typing import Any

from rl_plugins.errors import ConfigError
from rl_plugins.verl.cpu import ROLLOUT
from rl_plugins.verl.imports import after_import

ADAPTER = "rl_plugins.verl.cpu.rollout.ServerAdapter"


def claim(registry: MutableMapping[Any, Any], key: Any, value: Any, what: str) -> None:
    """Puts `value` under `key`, or finds itself there already.

    Raises:
        ConfigError: something else has the name.
    """
    present = registry.setdefault(key, value)
    if present is not value and present != value:
        raise ConfigError(
            f"rl-plugins cannot register {key!r} as {what} in verl, because {_name(present)} has that name already, "
            "and only one of them can serve VERL_PLATFORM=cpu. Unload the other plugin, for example with "
            "VERL_USE_EXTERNAL_PLUGINS=rl_plugins, or unset VERL_PLATFORM to run without ours."
        )


def place() -> None:
    """Registers each name as soon as the module with its registry was imported."""
    after_import("verl.workers.rollout.replica", _replica)
    after_import("verl.workers.rollout.base", _adapter)
    after_import("verl.checkpoint_engine.base", _checkpoint_engine)


def _replica(module: ModuleType) -> None:
    # The public `register` would overwrite without a word (verl/workers/rollout/replica.py:312).
    claim(module.RolloutReplicaRegistry._registry, ROLLOUT, _load_replica, "a rollout backend")


def _load_replica() -> Any:
    from rl_plugins.verl.cpu.rollout import Replica

    return Replica


def _adapter(module: ModuleType) -> None:
    # The trainer's side of a backend has no registering function at all (verl/workers/rollout/base.py:89).
    claim(module._ROLLOUT_REGISTRY, (ROLLOUT, "async"), ADAPTER, "a rollout backend")


def _checkpoint_engine(module: ModuleType) -> None:
    importlib.import_module("rl_plugins.verl.cpu.weights")  # registers itself


def _name(thing: Any) -> str:
    module = getattr(thing, "__module__", None)
    return f"{module}.{getattr(thing, '__qualname__', thing)}" if module else repr(thing)
