"""`dora_data` in the contract test."""

from __future__ import annotations

from typing import Any

import torch

from cases import Case, Effects
from cases.worlds import draw
from rl_plugins.testing.contract.effects import World


def cut_off(r: Any) -> Any:
    """Truncated rows, some of them loops of period 1 or 2, of mixed versions, with gradings that failed."""
    n = len(r)
    ends = [[5, 5, 5, 5], [5, 6, 5, 6], [5, 6, 7, 8], [5, 6, 7, 7]]
    ids = r.token_ids
    if ids is not None:
        completion = [torch.tensor([*c.tolist(), *ends[i % 4]]) for i, c in enumerate(ids.completion)]
        observed = [torch.cat([o, torch.ones(4, dtype=torch.bool)]) for o in ids.observed]
        r = r.replace(token_ids=type(ids).cat(ids.prompt, completion, observed))
    accuracy = torch.tensor([float(draw(i, 3) < 0.5) for i in range(n)], dtype=torch.float64)
    return r.replace(
        truncated=torch.tensor([draw(i, 1) < 0.7 for i in range(n)]),
        newest_version=r.version + torch.tensor([int(draw(i, 2) < 0.3) for i in range(n)]),
        rewards=torch.stack([accuracy, r.reward], 1),
        reward_names=("accuracy", "other"),
        reward_weights=torch.ones(2).double(),
        meta={**r.meta, "broken": [draw(i, 4) < 0.3 for i in range(n)]},
    )


CASE = Case(
    effects=Effects(
        World(prepare=cut_off, n=8),
        {"accuracy": ["accuracy"], "failed_column": ["broken"], "loop_tokens": [2, 3], "loop_period": [1]},
        ({}, {"loop_tokens": 4, "loop_period": 2}, {"truncated": "mask_unscored", "loop_tokens": 4, "loop_period": 2}),
    )
)
