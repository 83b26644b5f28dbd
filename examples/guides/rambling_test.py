"""The test of the method in rl_plugins_rambling.py. The guide docs/guides/methods.md shows this file."""

from __future__ import annotations

import math

from rl_plugins_rambling import Rambling

from rl_plugins import testing


def test_contract() -> None:
    testing.check_method(Rambling)


def test_rewards() -> None:
    rollouts = testing.make_rollouts(
        [1.0, 1.0, math.nan], group_size=3, text=["It is 4", "4, I think", "4"], meta={"answer": ["4", "4", "4"]}
    )
    made = Rambling(Rambling.Params(share=0.25)).rewards(rollouts)
    assert made[:2].tolist() == [1.0, 0.25] and made[2].isnan()
