"""Rollouts of every kind a host may hand over."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from rl_plugins.core.rollouts import Rollouts, Tokens
from rl_plugins.testing.contract.kit import BUDGET, NAN, Kit
from rl_plugins.testing.data import make_tokens, one_row_per_turn


def scenarios(kit: Kit) -> Iterator[tuple[str, Rollouts, Tokens]]:
    graded = np.random.default_rng(0).random(64).round(3).tolist()
    binary = [float(x > 0.5) for x in graded]
    ragged = [0, 1, 1, 2, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4]
    mixed = [7, 3, 7, 9, 3, 3, 9, 7, 9, 3, 9, 7, 3, 7]
    made = {
        "regular groups": kit.rollouts(binary[:BUDGET]),
        "graded rewards": kit.rollouts(graded[:BUDGET]),
        "ragged groups": kit.rollouts(binary[: len(ragged)], ragged),
        "interleaved groups": kit.rollouts(graded[: len(mixed)], mixed),
        "single-row groups": kit.rollouts(binary[:5], range(5)),
        "groups of equal rewards": kit.rollouts([0.0] * 4 + [1.0] * 4 + [0.1] * 4),
        "partly NaN groups": kit.rollouts([1, NAN, 0, 1, NAN, NAN, 1, 0, 0, 0, 1, NAN]),
        "NaN groups": kit.rollouts([NAN] * 4 + [1.0, 0, 0, 1] + [NAN] * 4 + [NAN, NAN, NAN, 1]),
        "one row": kit.rollouts([1.0]),
        "several reward functions": kit.rollouts(
            torch.tensor([[1, 0.5], [0, NAN], [NAN, NAN], [1, 1], [0, 0], [0, 0.2], [NAN, 0.1], [1, 0]]),
            weights=[1.0, 0.5],
        ),
        "turns": kit.rollouts(graded[:BUDGET], turns=True, lengths=[1, 2, 3, 4] * 4),
        "rollouts of two rows": kit.rollouts(
            np.repeat(binary[:8], 2).tolist(),
            np.repeat([0, 1], 8).tolist(),
            rollout=torch.arange(4).repeat_interleave(2).repeat(2),
            index=torch.arange(16) % 2,
        ),
        "rows without tokens": kit.rollouts(binary[:BUDGET], lengths=[0, 3, 2, 1] * 3 + [0] * 4),
        "foreign prompts": kit.rollouts(
            binary[:BUDGET],
            prompt_index=[-1] * 4 + [2] * 4 + [-1] * 4 + [5] * 4,
            truncated=torch.arange(BUDGET) % 3 == 0,
        ),
    }
    for name, rollouts in made.items():
        yield name, rollouts, kit.tokens(rollouts)
    yield ("one row per turn", *one_row_per_turn(made["turns"], kit.tokens(made["turns"])))
    rollouts = made["foreign prompts"]
    tokens = make_tokens(rollouts)
    assert tokens.rollout_logprobs is not None
    forced = (tokens.row % 5 == 0) | (tokens.position == 0)
    unknown = torch.where(forced, torch.nan, tokens.rollout_logprobs)
    yield "forced tokens", rollouts, kit.tokens(rollouts, forced=forced, rollout_logprobs=unknown)
