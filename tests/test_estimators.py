"""The hosts' GRPO estimator for groups of any size, against loops; on equal groups it is the hosts' reshape."""

from __future__ import annotations

import math
import statistics

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.estimators import batch_std, grpo_advantages
from rl_plugins.testing import make_rollouts

NAN = math.nan


def loop_grpo(ids, rewards, scale, eps):
    scored = [r for r in rewards if not math.isnan(r)]
    whole = statistics.stdev(scored) if len(scored) > 1 else 0.0
    out = []
    for g, r in zip(ids, rewards, strict=True):
        group = [x for h, x in zip(ids, rewards, strict=True) if h == g and not math.isnan(x)]
        if math.isnan(r):
            out.append(0.0)
            continue
        centered = r - math.fsum(group) / len(group)
        spread = {"group": statistics.stdev(group) if len(group) > 1 else 0.0, "batch": whole}.get(scale)
        out.append(centered if spread is None else centered / (spread + eps))
    return out


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.0, 0.1, 1.0, 1.5, -2.0, NAN])), min_size=1, max_size=20),
    st.sampled_from(["group", "batch", "none"]),
    st.sampled_from([1e-4, 1e-6]),
)
def test_equals_a_loop_over_ragged_groups_with_unscorable_rows(rows, scale, eps):
    ids, rewards = [g for g, _ in rows], [r for _, r in rows]
    out = grpo_advantages(make_rollouts(rewards, ids), scale, eps)
    assert out.dtype == torch.float64
    # a group of identical rewards is exactly 0 in ours; the loop leaves up to 1e-17 / eps
    assert out.tolist() == pytest.approx(loop_grpo(ids, rewards, scale, eps), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
def test_on_equal_groups_it_is_the_reshape_of_the_hosts(scale):
    rewards = torch.rand(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spread = {"group": rewards.std(1, keepdim=True) + 1e-4, "batch": rewards.std() + 1e-4, "none": 1.0}[scale]
    expected = (rewards - rewards.mean(1, keepdim=True)) / spread
    out = grpo_advantages(make_rollouts(rewards.flatten()), scale)
    assert torch.allclose(out, expected.flatten(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1 / 3])
def test_identical_rewards_and_groups_of_one_give_exactly_0(scale, reward):
    together = grpo_advantages(make_rollouts([reward] * 7, [0, 0, 0, 1, 1, 1, 2]), scale, eps=1e-6)
    assert together.tolist() == [0.0] * 7
    alone = grpo_advantages(make_rollouts([reward, 5.0, NAN], [0, 1, 2]), scale, eps=1e-6)
    assert alone.tolist() == [0.0] * 3


@pytest.mark.parametrize("group", [[0, 0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 1, 1, 1], [0, 1, 0, 1, 0, 1, 1, 1]])
def test_identical_rewards_far_from_0_are_0_beside_a_group_with_a_spread_and_rewards_stay_as_they_were(group):
    rewards = [1e8 + 0.1 if g == 0 else 1e8 + i for i, g in enumerate(group)]
    rollouts = make_rollouts(rewards, group)
    out = grpo_advantages(rollouts, eps=1e-6).tolist()
    assert rollouts.reward.tolist() == rewards
    assert [a for a, g in zip(out, group, strict=True) if g == 0] == [0.0] * group.count(0)
    small = [float(i) for i, g in enumerate(group) if g == 1]
    expected = [(x - statistics.mean(small)) / (statistics.stdev(small) + 1e-6) for x in small]
    assert [a for a, g in zip(out, group, strict=True) if g == 1] == pytest.approx(expected, rel=1e-12)


def test_a_row_without_a_reward_changes_nothing_for_the_others():
    for scale in ("group", "batch", "none"):
        without = grpo_advantages(make_rollouts([1.0, 0.0, 3.0], [0, 0, 0]), scale)
        beside = grpo_advantages(make_rollouts([1.0, NAN, 0.0, 3.0], [0, 0, 0, 0]), scale)
        assert beside.tolist() == [without[0], 0.0, without[1], without[2]]


def test_standard_deviation_of_a_batch():
    assert batch_std(torch.tensor([1.0, NAN, 4.0, 4.0]).double()).item() == pytest.approx(3**0.5)
    for few in ([], [2.0], [NAN, 2.0], [NAN]):
        assert batch_std(torch.tensor(few, dtype=torch.float64)).item() == 0.0
    assert grpo_advantages(make_rollouts([])).tolist() == []


def test_an_unknown_scale_is_refused():
    with pytest.raises(ValueError, match=r"scale is True; allowed: group, batch, none\."):
        grpo_advantages(make_rollouts([1.0]), True)
