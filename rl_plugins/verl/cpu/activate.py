"""Switches the CPU tool on in this process."""

from __future__ import annotations

import os


def activate() -> None:
    """Registers the platform, the rollout backend and the weight transfer, and places the workarounds.

    Does nothing without VERL_PLATFORM=cpu, and nothing new the second time. The platform is registered at once, all
    else right after the module of verl it belongs to was imported.

    Raises:
        ConfigError: a name is taken by somebody else.
    """
    if os.environ.get("VERL_PLATFORM", "").strip().lower() != "cpu":
        return
    from rl_plugins.verl.cpu import names, platform, workarounds

    platform.register()
    names.place()
    workarounds.place()
