"""GDPO against a plain loop, the authors' and TRL's numbers, its properties, and through the whole driver."""

from __future__ import annotations

import pytest
import torch
from golden_cases import Golden, floats
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.groups import Groups
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.methods.gdpo import Gdpo, gdpo_advantages
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_rollouts, one_step, start_stack

GOLDEN = Golden("gdpo")
CLOSE = dict(rel=1e-5, abs=1e-6)  # the authors computed in float32
NAN = float("nan")


def method(**params) -> Gdpo:
    return Gdpo(Gdpo.Params(**params))


def random_rewards(rows: int, functions: int = 2, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, functions, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def row_advantages(rewards, group=None, group_size=4, weights=None, lengths=None, **params) -> torch.Tensor:
    rollouts = make_rollouts(rewards, group, group_size, weights=weights, lengths=lengths)
    return method(**params).advantages(rollouts)


def oracle(rewards, group, weights, lengths, batch_stat="row", nan_policy="exclude", eps_group=1e-4, eps_batch=1e-4):
    """The method as loops over groups, functions and rows, in Python floats."""
    n, functions = len(rewards), len(weights)
    unscored = [all(r != r for r in row) for row in rewards]
    if nan_policy == "zero":
        rewards = [[0.0 if r != r else r for r in row] for row in rewards]
    total = [0.0] * n
    for g in set(group):
        for k in range(functions):
            scored = [i for i in range(n) if group[i] == g and rewards[i][k] == rewards[i][k]]
            values = [rewards[i][k] for i in scored]
            if len(values) < 2 or max(values) == min(values):
                continue
            mean = sum(values) / len(values)
            std = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
            for i in scored:
                total[i] += weights[k] * (rewards[i][k] - mean) / (std + eps_group)
    inside = [i for i in range(n) if nan_policy == "zero" or not unscored[i]]
    count = {i: lengths[i] if batch_stat == "token" else 1 for i in inside}
    size = sum(count.values())
    mean = sum(count[i] * total[i] for i in inside) / size
    variance = sum(count[i] * (total[i] - mean) ** 2 for i in inside) / max(size - 1, 1)
    scale = (variance + eps_batch**2) ** 0.5 if batch_stat == "token" else variance**0.5 + eps_batch
    alone = [group.count(g) == 1 for g in group]
    return [0.0 if unscored[i] or alone[i] else (total[i] - mean) / scale for i in range(n)]


value = st.one_of(st.sampled_from([0.0, 1.0, 0.7, NAN]), st.integers(-40, 40).map(lambda i: i / 8))


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(value, value, value, st.integers(0, 4), st.integers(1, 4)), min_size=1, max_size=24).filter(
        lambda rows: any(r == r for row in rows for r in row[:3])
    ),
    weights=st.tuples(*[st.sampled_from([1.0, 0.25, 2.0])] * 3),
    batch_stat=st.sampled_from(["row", "token"]),
    nan_policy=st.sampled_from(["exclude", "zero"]),
    eps=st.sampled_from([(1e-4, 1e-4), (0.5, 1e-3), (1e-3, 0.5)]),
)
def test_equals_the_loop_on_ragged_interleaved_groups_with_nan(rows, weights, batch_stat, nan_policy, eps):
    rewards, group, lengths = [row[:3] for row in rows], [row[3] for row in rows], [row[4] for row in rows]
    rollouts = make_rollouts(rewards, group, weights=weights, lengths=lengths)
    epsilons = {"eps_group": eps[0], "eps_batch": eps[1]}
    decision = one_step(start_stack(method(batch_stat=batch_stat, nan_policy=nan_policy, **epsilons)), rollouts)
    expected = oracle(rewards, group, weights, lengths, batch_stat, nan_policy, *eps)
    assert decision.row_advantages.tolist() == pytest.approx(expected, rel=1e-8, abs=1e-8)
    assert decision.trained.all()


@GOLDEN.kind("rewards_per_func", "reward_correctness", "reward_format")
def check_advantages(case):
    """TRL's forms act on rows, verl's on tokens. NaN rewards (null in a case) count as 0 in the authors' forks and are
    left out in TRL's own form, unless `nan_policy` says what a case has."""
    inputs, params, expected = case.inputs, case.params, case.expected
    columns = [name for name in inputs if name.startswith("reward_")]
    rewards = floats(inputs.get("rewards_per_func", []))
    rewards = rewards or [floats(list(row)) for row in zip(*(inputs[name] for name in columns), strict=True)]
    size, weights = params["num_generations"], params.get("weights", [1.0] * len(rewards[0]))
    group = [i // size for i in range(len(rewards))]
    if "index" in inputs:
        assert [list(dict.fromkeys(inputs["index"])).index(i) for i in inputs["index"]] == group
    lengths = inputs.get("response_lengths")
    rollouts = make_rollouts(rewards, group, weights=weights, lengths=lengths)

    def ours(nan_policy, **own):
        stack = start_stack(Gdpo(case.build(Gdpo, nan_policy=nan_policy, **own)))
        return one_step(stack, rollouts).row_advantages

    eps = params.get("epsilon_trl", 1e-4)
    trl = dict(eps_group=eps, eps_batch=eps)
    if "trl_official_advantages_row" in expected:
        assert ours("zero", **trl).tolist() == pytest.approx(expected["trl_official_advantages_row"], **CLOSE)
    if "trl_1_16_builtin_normalize_then_sum_row" in expected:
        wanted = expected["trl_1_16_builtin_normalize_then_sum_row"]
        assert ours("exclude", **trl).tolist() == pytest.approx(wanted, **CLOSE)
    if "grpo_sum_then_normalize_row" in expected:
        assert grpo_advantages(rollouts).tolist() == pytest.approx(expected["grpo_sum_then_normalize_row"], **CLOSE)
    if "trl_pre_batchnorm_row" in expected:
        before = torch.tensor(expected["trl_pre_batchnorm_row"], dtype=torch.float64)
        after = (before - before.mean()) / (before.std() + eps)
        assert ours("zero", **trl).tolist() == pytest.approx(after.tolist(), **CLOSE)
    if "verl_official_advantages_token" in expected:
        per_row = ours("zero", batch_stat="token", eps_group=params["epsilon_verl"])
        mask = torch.arange(inputs["T"]) < torch.tensor(lengths)[:, None]
        wanted = torch.tensor(expected["verl_official_advantages_token"], dtype=torch.float64)
        torch.testing.assert_close(per_row[:, None] * mask, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case):
    GOLDEN.check(case)


def test_further_golden_cases():
    GOLDEN.check_further_cases()


@pytest.mark.host
def test_equals_trls_own_normalize_then_sum_on_equal_groups():
    nanstd = pytest.importorskip("trl.trainer.utils", reason="TRL is not installed").nanstd
    generator = torch.Generator().manual_seed(0)
    rewards = torch.randn(48, 3, generator=generator)
    rewards[:, 1] = (rewards[:, 1] > 0).float()  # a binary one, and missing ones
    rewards[torch.rand(48, 3, generator=generator) < 0.15] = NAN
    rewards[5] = NAN
    weights = torch.tensor([1.0, 0.5, 2.0])
    for size in (2, 6, 16):
        grouped = rewards.view(-1, size, 3)
        per_function = (grouped - torch.nanmean(grouped, 1, keepdim=True)) / (nanstd(grouped, 1, keepdim=True) + 1e-4)
        total = (per_function.view(-1, 3) * weights).nansum(1)
        total[torch.isnan(rewards).all(1)] = NAN
        trl = torch.nan_to_num((total - torch.nanmean(total)) / (nanstd(total) + 1e-4), nan=0.0)
        ours = gdpo_advantages(rewards, weights, Groups(torch.arange(48) // size))
        assert ours.tolist() == pytest.approx(trl.tolist(), **CLOSE)
        assert ours[5] == 0 and ours.abs().max() > 1


def test_scale_and_shift_of_a_reward_and_a_common_factor_of_the_weights_do_not_matter():
    rewards, small = random_rewards(32), dict(eps_group=1e-10, eps_batch=1e-10)
    base = row_advantages(rewards, **small)
    changed = rewards * torch.tensor([50.0, 0.02]) + torch.tensor([3.0, -1.0])
    torch.testing.assert_close(row_advantages(changed, **small), base, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(row_advantages(rewards, weights=[5, 5], **small), base, rtol=1e-7, atol=1e-7)
    grpo = grpo_advantages(make_rollouts(rewards))
    assert (grpo_advantages(make_rollouts(changed)) - grpo).abs().max() > 0.5  # the sum does depend on it


def test_one_reward_is_grpo_times_one_positive_factor():
    rewards = random_rewards(32, functions=1)
    ours, grpo = row_advantages(rewards), grpo_advantages(make_rollouts(rewards))
    factor = ours / grpo
    assert factor.min() > 0
    torch.testing.assert_close(factor, torch.full_like(factor, factor[0].item()), rtol=1e-9, atol=0)
    assert abs(factor[0] - 1) > 0.05
    one_group, grpo = row_advantages(rewards[:8], group_size=8), grpo_advantages(make_rollouts(rewards[:8], None, 8))
    torch.testing.assert_close(one_group, (grpo - grpo.mean()) / (grpo.std() + 1e-4), rtol=1e-9, atol=1e-12)


def test_batch_statistics_are_those_of_rows_or_of_tokens():
    rewards, lengths = random_rewards(32), torch.arange(32) % 7 + 1
    by_row = row_advantages(rewards, lengths=lengths)
    assert by_row.mean().abs() < 1e-12 and by_row.std() == pytest.approx(1, abs=1e-3)
    by_token = row_advantages(rewards, lengths=lengths, batch_stat="token")
    tokens = by_token.repeat_interleave(lengths)
    assert tokens.mean().abs() < 1e-12 and tokens.std() == pytest.approx(1, abs=1e-6)
    assert by_token.mean().abs() > 1e-3  # so the two differ here
    same = row_advantages(rewards, lengths=[3] * 32, batch_stat="token")
    torch.testing.assert_close(same / same[0], by_row / by_row[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("size", [3, 6, 7, 12])
@pytest.mark.parametrize("batch_stat", ["row", "token"])
def test_constant_rewards_give_exact_zeros(size, batch_stat):
    constants = torch.tensor([[0.1, 0.7], [0.7, 0.3], [0.2, 1e3 + 0.1]], dtype=torch.float32)
    rewards = constants.repeat_interleave(size, 0)
    assert row_advantages(rewards, group_size=size, batch_stat=batch_stat).tolist() == [0.0] * (3 * size)
    rounding = rewards * (1 + 1.2e-7 * (torch.arange(3 * size) % 3 - 1))[:, None]  # a step of float32 up and down
    assert (rounding != rewards).any()
    assert row_advantages(rounding, group_size=size, batch_stat=batch_stat).tolist() == [0.0] * (3 * size)


def test_a_reward_constant_in_a_group_adds_nothing_there():
    rewards = random_rewards(16)
    rewards[:4, 1] = 0.3
    changed = rewards.clone()
    changed[:4, 1] = 0.9
    assert torch.equal(row_advantages(rewards), row_advantages(changed))
    first = row_advantages(rewards)[:4]
    grpo = grpo_advantages(make_rollouts(rewards[:, :1]))[:4]
    torch.testing.assert_close(first / first[0], grpo / grpo[0], rtol=1e-9, atol=1e-9)


def test_order_of_rows_groups_and_functions_does_not_matter():
    rewards, group, lengths = random_rewards(24, 3, seed=3), torch.arange(24) % 5, torch.arange(24) % 4 + 1
    order = torch.randperm(24, generator=torch.Generator().manual_seed(4))
    for batch_stat in ("row", "token"):
        base = row_advantages(rewards, group.tolist(), weights=[1, 2, 3], lengths=lengths, batch_stat=batch_stat)
        moved = row_advantages(
            rewards[order][:, [2, 0, 1]],
            (10 - group[order]).tolist(),
            weights=[3, 1, 2],
            lengths=lengths[order],
            batch_stat=batch_stat,
        )
        torch.testing.assert_close(moved, base[order], rtol=1e-10, atol=1e-12)


def test_missing_rewards_are_left_out_or_count_as_zero():
    rewards = [[1.0, 2.0], [0.0, NAN], [4.0, 5.0], [NAN, NAN]]
    by_policy = {}
    for policy in ("exclude", "zero"):
        decision = one_step(start_stack(method(nan_policy=policy)), make_rollouts(rewards))
        by_policy[policy] = decision.row_advantages.tolist()
        assert by_policy[policy][3] == 0  # nobody scored the row
    a, b = 1 / (13 / 3) ** 0.5, 1 / 4.5**0.5  # first reward: 1, 0, 4; second reward: 2, 5
    total = torch.tensor([-2 / 3 * a - 1.5 * b, -5 / 3 * a, 7 / 3 * a + 1.5 * b])
    assert by_policy["exclude"][:3] == pytest.approx((total / total.std()).tolist(), abs=1e-3)
    filled = row_advantages([[1.0, 2.0], [0.0, 0.0], [4.0, 5.0], [0.0, 0.0]])
    assert by_policy["zero"][:3] == pytest.approx(filled[:3].tolist(), rel=1e-12)


def test_groups_of_one_get_zero_and_a_warning(caplog):
    rewards, group = [[5.0, -3.0], [1.0, 0.0], [0.0, 1.0], [3.0, 4.0]], [7, 2, 2, 2]
    for batch_stat in ("row", "token"):
        a = start_stack(method(batch_stat=batch_stat)).one("advantages", make_rollouts(rewards, group))
        assert a[0] == 0 and a[1:].abs().min() > 0.1
    assert len(caplog.messages) == 2 and "a single row" in caplog.messages[0]


def test_through_the_driver_with_metrics_per_reward():
    rewards = random_rewards(8)
    rewards[:4, 1] = 1.0
    stack = start_stack(method())
    decision = one_step(stack, make_rollouts(rewards))
    assert decision.estimator == "gdpo" and decision.uniform and decision.trained.all()
    expected = oracle(rewards.tolist(), [0] * 4 + [1] * 4, [1.0, 1.0], [1] * 8)
    assert decision.row_advantages.tolist() == pytest.approx(expected, rel=1e-9)
    metrics = combine([stack.metrics.take()])
    largest = max(abs(a) for a in expected)
    assert metrics == {
        "gdpo/constant/reward_0": 0.0,
        "gdpo/constant/reward_1": 0.5,
        "gdpo/max_abs_advantage": pytest.approx(largest),
    }


class Withdraw(Method):
    name = "withdraw"

    def rewards(self, rollouts):
        return torch.where(rollouts.rollout == 1, torch.nan, rollouts.reward)


class Bonus(Method):
    name = "bonus"

    def rewards(self, rollouts):
        return rollouts.reward + (rollouts.rollout == 1)


@pytest.mark.parametrize("nan_policy", ["exclude", "zero"])
def test_withdrawn_rows_are_out_of_every_statistic(nan_policy):
    rewards = random_rewards(16)
    decision = one_step(start_stack(Withdraw(), method(nan_policy=nan_policy)), make_rollouts(rewards))
    stay = torch.arange(16) % 4 != 1
    expected = row_advantages(rewards[stay], group_size=3)
    torch.testing.assert_close(decision.row_advantages[stay], expected, rtol=1e-10, atol=1e-12)
    assert not decision.row_advantages[~stay].any()


def test_a_reward_that_another_method_changed_is_refused():
    with pytest.raises(MethodError, match=r"another method changed the reward.*Remove `gdpo`"):
        one_step(start_stack(Bonus(), method()), make_rollouts(random_rewards(8)))


def test_nothing_is_left_to_do_when_every_row_was_taken_out():
    rollouts = make_rollouts(random_rewards(4)).subset(torch.zeros(4, dtype=torch.bool))
    assert method().advantages(rollouts).shape == (0,)
    assert method(batch_stat="token").advantages(rollouts).shape == (0,)


def host(aggregation="sum_then_normalize", missing=None) -> HostCapabilities:
    default = {"multi_objective_aggregation": "sum_then_normalize"}
    options = {"multi_objective_aggregation": aggregation}
    return HostCapabilities("trl", "1.16.0", {"advantages"}, {}, (), missing or {}, None, options, default)


def test_preflight_refuses_a_single_reward_and_trls_option_beside_it():
    stack = build_stack("gdpo")
    assert preflight(stack, host()) == {}
    with pytest.raises(ConfigError, match=r"`gdpo` sets multi_objective_aggregation.*'normalize_then_sum'"):
        preflight(stack, host("normalize_then_sum"))
    with pytest.raises(ConfigError, match="two or more reward functions: this run has one"):
        preflight(stack, host(missing={"several_rewards": "this run has one."}))


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"eps_group": 0}, "eps_group"),
        ({"eps_batch": -1}, "eps_batch"),
        ({"batch_stat": "mean"}, "batch_stat"),
        ({"nan_policy": "drop"}, "nan_policy"),
    ],
)
def test_parameters_out_of_range_are_named(values, wrong):
    with pytest.raises(ConfigError, match=f"gdpo.*{wrong}"):
        build_params(Gdpo.Params, values, "gdpo")
