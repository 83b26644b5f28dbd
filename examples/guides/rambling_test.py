"""A method that reads completions and a column of the dataset, with its test. The guide docs/guides/methods.md shows
this file."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from rl_plugins import Method, Rollouts, testing


class Rambling(Method):
    """Halves the reward of a completion that goes on after the answer of the dataset."""

    name = "rambling"
    needs = frozenset({"text", "column:answer"})

    def rewards(self, rollouts: Rollouts) -> Tensor:
        assert rollouts.text is not None  # `needs` names it
        pairs = zip(rollouts.text, rollouts.meta["answer"], strict=True)
        at_end = torch.tensor([text.rstrip().endswith(str(answer)) for text, answer in pairs])
        return torch.where(at_end, rollouts.reward, 0.5 * rollouts.reward)


def test_rambling() -> None:
    rollouts = testing.make_rollouts(
        [1.0, 1.0, math.nan], group_size=3, text=["It is 4", "4, I think", "4"], meta={"answer": ["4", "4", "4"]}
    )
    made = Rambling().rewards(rollouts)
    assert made[:2].tolist() == [1.0, 0.5] and made[2].isnan()
    testing.check_method(Rambling)
