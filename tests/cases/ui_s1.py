"""`ui_s1` in the contract test."""

from __future__ import annotations

from typing import Any

import torch

from cases import Case, Effects
from cases.worlds import draw
from rl_plugins.testing.contract.effects import World


def graded_turns(r: Any) -> Any:
    keys = list(zip(r.turns.row.tolist(), r.turns.turn.tolist(), strict=True))
    reward = torch.tensor([draw("reward", r.batch, *k) for k in keys], dtype=torch.float64)
    return r.replace(turns=r.turns.replace(reward=reward, valid=torch.tensor([draw("valid", *k) < 0.8 for k in keys])))


CASE = Case(effects=Effects(World(prepare=graded_turns), settings=({}, {"filter_by": "none"})))
