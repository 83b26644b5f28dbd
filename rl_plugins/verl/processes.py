"""The other processes of a run: they confirm the methods, and a worker that died ends the run instead of a wait."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import ray

from rl_plugins.errors import ConfigError, MethodError
from rl_plugins.stack import MethodStack


def report(actor: Any, methods: Sequence[str]) -> dict[str, Any]:
    """Runs in a worker: what of rl-plugins it has."""
    import importlib.metadata

    from rl_plugins import registry
    from rl_plugins.verl import plugin

    claims = {name: list(cls.claims()) for name, cls in registry.select(list(methods)).classes.items()}
    return {
        "version": importlib.metadata.version("rl-plugins"),
        "process": f"{socket.gethostname()}:{os.getpid()}",
        "loaded": plugin._loaded,
        "claims": claims,
    }


def confirm(stack: MethodStack, workers: Mapping[str, Sequence[Any]]) -> str:
    """Asks every worker for its methods and compares them with the driver's.

    Returns:
        A line for the log: which processes confirmed.

    Raises:
        ConfigError: a worker has another version of rl-plugins, or other methods.
    """
    mine = report(None, stack.names)
    places = [(place, w) for place, group in workers.items() for w in group]
    try:
        found = ray.get([w.__ray_call__.remote(report, stack.names) for _, w in places])
    except Exception as e:
        raise ConfigError(
            f"A worker could not confirm the methods ({type(e).__name__}: {e}). rl-plugins must be installed in the "
            f"environment of every node."
        ) from e
    for (place, _), theirs in zip(places, found, strict=True):
        for key in ("version", "claims"):
            if theirs[key] != mine[key]:
                raise ConfigError(
                    f"The {place} worker {theirs['process']} has another {key} of rl-plugins than the driver: "
                    f"{theirs[key]} against {mine[key]}. Install the same packages on every node."
                )
        if not theirs["loaded"]:
            raise ConfigError(
                f"The {place} worker {theirs['process']} did not load the verl plugin of rl-plugins. Remove "
                f"VERL_USE_EXTERNAL_PLUGINS from its environment, or name rl_plugins in it."
            )
    listed = ", ".join(f"{place} {theirs['process']}" for (place, _), theirs in zip(places, found, strict=True))
    return f"rl-plugins {mine['version']}: methods confirmed by {len(found)} workers ({listed})"


def died(name: str, error: Exception) -> MethodError:
    """The error for a worker that is gone."""
    return MethodError(
        f"The worker `{name}` died while rollouts were made: {error} The state of the methods is that of the last "
        f"checkpoint; start the run again with trainer.resume_mode=auto."
    )


class Watch:
    """Notices workers that died. verl waits for their rollouts without an end."""

    def __init__(self, workers: Mapping[str, Any]) -> None:
        self.workers = dict(workers)
        self.pending = {name: w.__ray_ready__.remote() for name, w in self.workers.items()}

    def check(self) -> None:
        """Raises MethodError if a worker is dead; returns at once otherwise."""
        for name, ref in list(self.pending.items()):
            done, _ = ray.wait([ref], timeout=0)
            if not done:
                continue
            try:
                ray.get(ref)
            except ray.exceptions.RayActorError as e:
                raise died(name, e) from e
            self.pending[name] = self.workers[name].__ray_ready__.remote()
