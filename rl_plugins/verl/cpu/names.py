"""Our names in verl's registries of platforms, rollout backends and weight transfers. A name that is taken stays as it
is."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from rl_plugins.verl.cpu import ROLLOUT, free
from rl_plugins.verl.imports import after_import

ADAPTER = "rl_plugins.verl.cpu.rollout.ServerAdapter"


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
        present = None
    # the public `register` would overwrite without a word (verl/workers/rollout/replica.py:312)
    if free(present, present and _load_replica(), ROLLOUT, "a rollout backend"):
        registry.register(ROLLOUT, _load_replica)


def _load_replica() -> Any:
    from rl_plugins.verl.cpu.rollout import Replica

    return Replica


def _adapter(module: ModuleType) -> None:
    # The trainer's side of a backend has no registering function at all (verl/workers/rollout/base.py:89).
    registry = module._ROLLOUT_REGISTRY
    if free(registry.get((ROLLOUT, "async")), ADAPTER, ROLLOUT, "a rollout backend"):
        registry[ROLLOUT, "async"] = ADAPTER


def _checkpoint_engine(module: ModuleType) -> None:
    importlib.import_module("rl_plugins.verl.cpu.weights")  # registers itself, whoever imports it first
