"""The other processes of a run: they confirm the methods, and a worker that died ends the run instead of a wait."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import ray

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.runtime.stack import MethodStack


def report(actor: Any, methods: Sequence[str]) -> dict[str, Any]:
    """Runs in a worker: what of rl-plugins it has."""
    import importlib.metadata

    from rl_plugins.runtime import registry

    claims = {name: list(cls.claims()) for name, cls in registry.select(list(methods)).classes.items()}
    return {
        "version": importlib.metadata.version("rl-plugins"),
        "process": f"{socket.gethostname()}:{os.getpid()}",
        "loaded": "rl_plugins.verl.plugin" in sys.modules,  # one that failed is not there
        "claims": claims,
    }


def ask(workers: Sequence[Any], function: Callable[..., Any], *args: Any) -> list[Any]:
    """What a function says that runs in each worker, with the worker as its first argument."""
    answers: list[Any] = ray.get([w.__ray_call__.remote(function, *args) for w in workers])
    return answers


def wrap(worker: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Runs in a worker: its method `name` becomes what `make` makes of it."""
    setattr(worker, name, make(getattr(worker, name)))


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
        found = ask([w for _, w in places], report, stack.names)
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


def program_errors(actor: Any) -> list[str]:
    """Runs in an agent-loop worker: what ended rollout programs there."""
    return list(getattr(actor, "rl_plugins_errors", ()))


class Watch:
    """Notices agent-loop workers that died, and rollout programs that failed in them. verl waits for rollouts of the
    first without an end, and goes on without those of the second."""

    def __init__(self, workers: Mapping[str, Any]) -> None:
        self.workers = dict(workers)
        self.pending = {name: self._ask(name) for name in self.workers}

    def _ask(self, name: str) -> Any:
        return self.workers[name].__ray_call__.remote(program_errors)

    def check(self, wait: bool = False) -> None:
        """Raises MethodError if a worker is dead or a program failed; returns at once otherwise.

        Args:
            wait: ask again and wait for the answers, so that nothing that happened before is missed.
        """
        for name, ref in list(self.pending.items()):
            if wait:
                ref = self._ask(name)
            elif not ray.wait([ref], timeout=0)[0]:
                continue
            try:
                errors = ray.get(ref)
            except ray.exceptions.RayActorError as e:
                raise died(name, e) from e
            if errors:
                raise MethodError(errors[0])
            self.pending[name] = self._ask(name)
