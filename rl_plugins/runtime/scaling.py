"""More samples per batch at the same mini-batch: what an adapter changes in a config, and the arithmetic both share."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rl_plugins.core.errors import ConfigError, shown


@dataclass(frozen=True)
class Setting:
    """One option of a config.

    Args:
        option: its name, dotted in verl.
        before, after: its values; None: not set.
        why: the reason, a sentence or less.
    """

    option: str
    before: Any
    after: Any
    why: str


@dataclass(frozen=True)
class Scaled:
    """What a config with more samples per batch has.

    Args:
        settings: options that need another value.
        kept: the options of the inner loop, which keep theirs.
        batch: a batch before and after, in one sentence.
        notes: what else changes.
    """

    settings: tuple[Setting, ...]
    kept: Mapping[str, Any]
    batch: str
    notes: tuple[str, ...]

    @property
    def values(self) -> dict[str, Any]:
        """Option -> its new value."""
        return {s.option: s.after for s in self.settings}


def whole(option: str, value: Any) -> int:
    """`value` as a number of rows, prompts or steps.

    Raises:
        ConfigError: it is no integer above 0.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{option} is {shown(value)}. Only an integer above 0 can be scaled. Write out its value.")
    return value


def fewer(option: str, value: int, by: int, what: str) -> Setting:
    """A number of batches, which are `by` times as large now. It is rounded up, so that no sample is left out.

    Args:
        what: what the option counts in batches, e.g. "length of the run".
    """
    after = math.ceil(value / by)
    return Setting(option, value, after, f"{what} in batches, {'rounded up' if value % by else 'same samples'}")


def check_divisible(batch: int, mini: int, by: int, what: str) -> None:
    """Raises ConfigError if the larger batch is no whole number of mini-batches.

    Args:
        batch, mini: their sizes before.
        what: both in words, e.g. "data.train_batch_size is 6 and ppo_mini_batch_size is 4".
    """
    if batch * by % mini == 0:
        return
    multiple = mini // math.gcd(batch, mini)
    raise ConfigError(
        f"{what}, and {by} x {batch} = {batch * by} is no multiple of {mini}. A batch must be a whole number of "
        f"mini-batches, because no group may be dropped. Give --by a multiple of {multiple}, e.g. --by "
        f"{multiple * max(1, math.ceil(by / multiple))}."
    )
