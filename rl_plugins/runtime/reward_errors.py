"""The option `on_reward_error`: what becomes of a row on which the reward function raises. Both hosts have it."""

from __future__ import annotations

from typing import Any

from rl_plugins.core.errors import ConfigError, shown

STOP, MASK = "stop", "mask"
HELP = "With methods: stop: an exception of a reward function ends the run; mask: the row has no reward, as with None."


def check_on_reward_error(given: Any, name: str) -> str:
    """The option.

    Args:
        name: of the option in the host.

    Raises:
        ConfigError: it is neither.
    """
    if given not in (STOP, MASK):
        raise ConfigError(f"{name}={shown(given)} is given; allowed are {STOP} and {MASK}.")
    return str(given)
