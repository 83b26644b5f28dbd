"""Statistics over all tokens of a batch, part by part: no array of all tokens is made on the way."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins.core.groups import parts
from rl_plugins.core.rollouts import Rollouts, Tokens


def live_tokens(rollouts: Rollouts, tokens: Tokens) -> Tensor:
    """(tokens,) bool: in the update, and of a row with a reward."""
    scored = ~torch.isnan(rollouts.reward)
    return tokens.keep if bool(scored.all()) else tokens.keep & scored.index_select(0, tokens.row)


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation (divisor n - 1; 0 of one token) of a number per token.

    Attributes:
        anchor, shift: the mean is anchor + shift. The anchor is a mean of the first tokens, taken from one of them, so
            identical numbers have exactly the deviation 0.
        std: standard deviation.
    """

    anchor: float
    shift: float
    std: float

    @classmethod
    def of(cls, values: Callable[[slice], Tensor], live: Tensor) -> Spread:
        """Of the tokens where `live`, (tokens,) bool, is True: at least one.

        Args:
            values: a part of the tokens -> float64 numbers.
        """
        n, total, square, anchor = 0, 0.0, 0.0, torch.nan
        for part in parts(len(live)):
            own, x = live[part], values(part)
            count = int(torch.count_nonzero(own))
            if not count:
                continue
            if not n:
                first = x[own]
                anchor = float(first[0] + (first - first[0]).mean())
            deviation = x - anchor
            if count < len(own):
                deviation = torch.where(own, deviation, 0.0)
            n += count
            total += float(deviation.sum())
            square += float(torch.dot(deviation, deviation))
        shift = total / n
        variance = max(square - total * shift, 0.0) / (n - 1) if n > 1 else 0.0
        return cls(anchor, shift, variance**0.5)

    @property
    def mean(self) -> float:
        return self.anchor + self.shift

    def centered(self, x: Tensor) -> Tensor:
        """Differences from the mean."""
        return (x - self.anchor).sub_(self.shift)
