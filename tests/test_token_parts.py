"""Rules per token are applied part by part: the parts change nothing, and identical numbers have the deviation 0."""

from __future__ import annotations

import pytest
import torch

from rl_plugins.core import groups
from rl_plugins.kit.whole_batch import Spread
from rl_plugins.methods.d3s import top_tokens
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_rollouts, make_run, make_tokens

METHODS = ("d3s", "echo_shaping", "aepo_advantages", "mssr_shaping", "echo_clip", "xrpo_novelty")


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("some_left", [False, True])
def test_parts_change_nothing(name: str, some_left: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = [1.0, 0.0, 0.5, 1.0, float("nan"), 0.0, 1.0, 0.0]
    rollouts = make_rollouts(rewards, lengths=[5, 1, 7, 0, 2, 9, 3, 4])
    tokens = make_tokens(rollouts)
    advantages = torch.randn(len(tokens), generator=torch.Generator().manual_seed(0)).double()
    entropies = (tokens.entropies * 3).round() / 3  # with ties
    tokens = tokens.replace(advantages=advantages.round(decimals=0), entropies=entropies)
    if some_left:
        tokens = tokens.replace(keep=tokens.position % 3 != 1)
    found = []
    for size in (groups._PART, 4):
        monkeypatch.setattr(groups, "_PART", size)
        stack = build_stack(name)
        stack.start(make_run(total_batches=10))
        shape = stack.call("shape", stack.methods[0], rollouts, tokens)
        found.append(({**vars(shape), **shape.row_columns}, combine([stack.metrics.take()])))
    (whole, logged), (in_parts, logged_in_parts) = found
    assert logged_in_parts == pytest.approx(logged, rel=1e-12, nan_ok=True)
    for key, value in whole.items():
        if isinstance(value, torch.Tensor):
            torch.testing.assert_close(in_parts[key], value, rtol=1e-12, atol=1e-14)


def test_of_equal_tokens_the_first_of_the_batch_stay_whatever_their_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_PART", 4)
    tokens = make_tokens(make_rollouts([1.0, 0.0], lengths=[9, 9]))
    equal = tokens.replace(advantages=torch.ones(18).double(), entropies=torch.ones(18))
    assert top_tokens(equal, torch.arange(18) != 3, 10 / 17).tolist() == [i < 11 and i != 3 for i in range(18)]


def test_the_spread_of_live_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_PART", 16)
    x = torch.rand(100, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 1e6
    live = torch.arange(100) % 5 != 0
    live[:20] = False
    spread = Spread.of(lambda part: x[part], live)
    assert spread.mean == pytest.approx(float(x[live].mean()), rel=1e-15)
    assert spread.std == pytest.approx(float(x[live].std()), rel=1e-9)
    same = torch.full((100,), 0.1, dtype=torch.float64)
    spread = Spread.of(lambda part: same[part], live)
    assert spread.std == 0 and not spread.centered(same).any()
    assert Spread.of(lambda part: x[part], torch.arange(100) == 50).std == 0
