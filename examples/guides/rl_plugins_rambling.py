"""A method that reads completions and a column of the dataset. The guide docs/guides/methods.md shows this file: what
`rl-plugins new rambling --hook rewards` writes, with another rule."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rl_plugins import Method, MethodParams, Rollouts, param


class Rambling(Method):
    """Lowers the reward of a completion that goes on after the answer.

        r_i <- share r_i where completion i does not end with the column `answer`

    Symbols:
        r (rows,): rewards.

    Raises: ConfigError for a parameter out of range.
    """

    name = "rambling"
    needs = frozenset({"text", "column:answer"})

    @dataclass(frozen=True)
    class Params(MethodParams):
        share: float = param(0.5, "what is left of the reward", ge=0, le=1)

    def rewards(self, rollouts: Rollouts) -> Tensor:
        assert rollouts.text is not None  # `needs` names it
        pairs = zip(rollouts.text, rollouts.meta["answer"], strict=True)
        at_end = torch.tensor([text.rstrip().endswith(str(answer)) for text, answer in pairs])
        return torch.where(at_end, rollouts.reward, self.params.share * rollouts.reward)
