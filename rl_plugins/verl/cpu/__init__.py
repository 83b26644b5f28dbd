"""verl on a machine without an accelerator: a debugging tool, active only with VERL_PLATFORM=cpu in the environment.

It works with verl's own trainers, whether methods are named or not. See docs/verl_cpu.md. `activate.py` switches it on.
"""

from __future__ import annotations

from typing import Any

from rl_plugins.core.errors import ConfigError

ROLLOUT = "hf_cpu"
"""Name of the rollout backend: `actor_rollout_ref.rollout.name=hf_cpu`."""
CHECKPOINT_ENGINE = "cpu_file"
"""Name of the weight transfer: `actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_file`."""


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


def _shown(thing: Any) -> str:
    module = getattr(thing, "__module__", None)
    return f"{module}.{getattr(thing, '__qualname__', thing)}" if module else repr(thing)
