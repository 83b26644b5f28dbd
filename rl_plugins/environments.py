"""Where environments are found since the first version; they are defined in `rl_plugins.agents`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rl_plugins.agents.environment import ENDED, Environment, Observation, TurnRecord

if TYPE_CHECKING:
    from rl_plugins.trl.environments import as_tools

__all__ = ["ENDED", "Environment", "Observation", "TurnRecord", "as_tools"]


def __getattr__(name: str) -> Any:
    if name == "as_tools":  # TRL's, so it is in that adapter
        from rl_plugins.trl.environments import as_tools

        return as_tools
    raise AttributeError(f"module 'rl_plugins.environments' has no attribute {name!r}")
