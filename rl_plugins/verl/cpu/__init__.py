"""verl on a machine without an accelerator: a debugging tool, active only with VERL_PLATFORM=cpu in the environment.

It works with verl's own trainers, whether methods are named or not. See docs/verl_cpu.md.
"""

from __future__ import annotations

import os

ROLLOUT = "hf_cpu"
"""Name of the rollout backend: `actor_rollout_ref.rollout.name=hf_cpu`."""
CHECKPOINT_ENGINE = "cpu_file"
"""Name of the weight transfer: `actor_rollout_ref.rollout.checkpoint_engine.backend=cpu_file`."""


def wanted() -> bool:
    """Whether this process asks verl for the CPU platform."""
    return os.environ.get("VERL_PLATFORM", "").strip().lower() == "cpu"


def activate() -> None:
    """Registers the platform, the rollout backend and the weight transfer, and places the workarounds.

    Does nothing without VERL_PLATFORM=cpu, and nothing new the second time. The platform is registered at once, all
    else right after the module of verl it belongs to was imported.

    Raises:
        ConfigError: a name is taken by somebody else.
    """
    if not wanted():
        return
    from rl_plugins.verl.cpu import host, names, platform

    platform.register()
    if not _placed:
        _placed.append(True)
        names.place()
        host.place()


_placed: list[bool] = []
