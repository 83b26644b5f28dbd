"""MC-GRPO against a plain loop, the authors' numbers, its properties, and through the whole driver."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch
from golden_cases import Golden, floats
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.methods.mc_grpo import McGrpo
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_plan, make_rollouts, one_step, start_stack

GOLDEN = Golden("mc_grpo")
NAN = float("nan")


def method(**params) -> McGrpo:
    return McGrpo(McGrpo.Params(**params))


def advantages(rewards, group=None, group_size=3, **params) -> list[float]:
    rollouts = make_rollouts(rewards, group, group_size)
    return method(**params).advantages(rollouts).tolist()


def oracle(rewards, group, scale="mad", mad_eps=1e-3, zero_compensation=False, advantage_clip=None):
    """The method as a loop over groups and rows, in Python floats."""
    out = [0.0] * len(rewards)
    for g in set(group):
        scored = [i for i, h in enumerate(group) if h == g and rewards[i] == rewards[i]]
        if not scored:
            continue
        values = sorted(rewards[i] for i in scored)
        n = len(values)
        m = values[(n - 1) // 2]
        mad = sorted(abs(v - m) for v in values)[(n - 1) // 2]
        mean = sum(values) / n
        std = (sum((v - mean) ** 2 for v in values) / (n - 1)) ** 0.5 if n > 1 else 0.0
        divisor = {"mad": mad + mad_eps, "std": std + mad_eps, "none": 1.0}[scale]
        a = {i: (rewards[i] - m) / divisor for i in scored}
        non_zero = [i for i in scored if abs(a[i]) > 1e-6]
        for i in scored:
            if zero_compensation and i in non_zero:
                a[i] *= n / len(non_zero)
            if advantage_clip is not None:
                a[i] = max(-advantage_clip, min(advantage_clip, a[i]))
            out[i] = a[i]
    return out


reward_values = st.one_of(
    st.sampled_from([0.0, 1.0, 1.5, 2.0, NAN]), st.floats(-100, 100, width=32).filter(lambda x: abs(x) > 1e-3)
)


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(st.tuples(reward_values, st.integers(0, 4)), min_size=1, max_size=24).filter(
        lambda rows: any(r == r for r, _ in rows)
    ),
    scale=st.sampled_from(["mad", "none", "std"]),
    zero_compensation=st.booleans(),
    advantage_clip=st.sampled_from([None, 10.0]),
)
def test_equals_the_loop_on_ragged_interleaved_groups_with_nan(rows, scale, zero_compensation, advantage_clip):
    rewards, group = [r for r, _ in rows], [g for _, g in rows]
    params = dict(scale=scale, zero_compensation=zero_compensation, advantage_clip=advantage_clip)
    decision = one_step(start_stack(method(**params)), make_rollouts(rewards, group))
    expected = oracle(rewards, group, **params)
    trained = decision.trained.tolist()
    for g in set(group):
        members = [i for i, h in enumerate(group) if h == g]
        left = [i for i in members if not trained[i]]
        assert len(left) == (len(members) > 1)
        scored = sorted(rewards[i] for i in members if rewards[i] == rewards[i])
        if left and scored:
            assert rewards[left[0]] == scored[(len(scored) - 1) // 2]  # so never NaN
            assert expected[left[0]] == 0
    for i, row in enumerate(trained):
        if row:
            assert float(decision.row_advantages[i]) == pytest.approx(expected[i], rel=1e-9, abs=1e-9)


@GOLDEN.kind("rewards")
def check_advantages(case):
    inputs, expected = case.inputs, case.expected
    inputs.must_be("layout", "contiguous groups of group_size")
    rewards, params = floats(inputs["rewards"]), case.build(McGrpo)
    rollouts = make_rollouts(rewards, group_size=case.params["group_size"])
    groups, close = rollouts.groups, dict(rel=1e-6, abs=1e-6)  # theirs is float32
    median = groups.median(rollouts.reward)
    for compensate, key in ((False, "math_variant"), (True, "gsm_variant_zero_compensated")):
        stack = start_stack(McGrpo(replace(params, zero_compensation=compensate)))
        assert stack.one("advantages", rollouts).tolist() == pytest.approx(expected[f"advantages_{key}"], **close)
        leaves = ~one_step(stack, rollouts).trained
        assert leaves.tolist() == expected["excluded_flag_observed_on_cpu"]
        at_median = rollouts.reward == groups.rows(median)
        assert bool(at_median[leaves].all()) == expected["excluded_index_is_any_row_equal_to_median"]
    assert median.tolist() == pytest.approx(expected["median_per_group"], rel=1e-7)
    unscaled = McGrpo(replace(params, scale="none", advantage_clip=None)).advantages(rollouts)
    scaled = McGrpo(replace(params, zero_compensation=False, advantage_clip=None)).advantages(rollouts)
    divisor = torch.tensor(expected["mad_plus_eps_per_row"], dtype=torch.float64)
    torch.testing.assert_close(scaled * divisor, unscaled, rtol=1e-6, atol=1e-8)
    deviations = groups.median((rollouts.reward - groups.rows(median)).abs())
    assert divisor.tolist() == pytest.approx((groups.rows(deviations) + params.mad_eps).tolist(), rel=1e-6)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case):
    GOLDEN.check(case)


def test_further_golden_cases():
    GOLDEN.check_further_cases()


def test_advantages_do_not_change_when_rewards_are_shifted_or_scaled():
    rewards = torch.randn(30, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    base = advantages(rewards, group_size=5)
    assert advantages(rewards + 7.5, group_size=5) == pytest.approx(base, rel=1e-9, abs=1e-9)
    tiny = advantages(rewards, group_size=5, mad_eps=1e-12)
    assert advantages(3 * rewards, group_size=5, mad_eps=1e-12) == pytest.approx(tiny, rel=1e-9, abs=1e-9)
    assert advantages(3 * rewards, group_size=5) != pytest.approx(base, rel=1e-4)  # mad_eps does count


def test_order_of_rows_and_other_groups_do_not_matter():
    generator = torch.Generator().manual_seed(2)
    rewards, group = torch.randn(24, dtype=torch.float64, generator=generator), torch.arange(24) % 4
    order = torch.randperm(24, generator=generator)
    base = method().advantages(make_rollouts(rewards, group.tolist()))
    moved = method().advantages(make_rollouts(rewards[order], group[order].tolist()))
    assert torch.equal(moved, base[order])
    alone = method().advantages(make_rollouts(rewards[group == 2], [0] * 6))
    assert torch.equal(alone, base[group == 2])


@pytest.mark.parametrize("n", [3, 5, 9])
def test_odd_groups_have_a_zero_and_at_most_half_of_the_others_on_each_side(n):
    rewards = torch.randn(40 * n, dtype=torch.float64, generator=torch.Generator().manual_seed(n)).round(decimals=1)
    a = method().advantages(make_rollouts(rewards, group_size=n)).view(-1, n)
    assert ((a == 0).sum(1) >= 1).all()
    assert ((a > 0).sum(1) <= (n - 1) // 2).all() and ((a < 0).sum(1) <= (n - 1) // 2).all()


def test_even_groups_take_the_lower_median():
    assert advantages([0.0, 1.0, 2.0, 4.0], group_size=4, scale="none") == [-1.0, 0.0, 1.0, 3.0]


def test_equal_rewards_give_exact_zeros_and_still_lose_one_rollout():
    decision = one_step(start_stack(method()), make_rollouts([0.1] * 6, group_size=3))
    assert decision.advantages.tolist() == [0.0] * len(decision.advantages)
    assert decision.trained.view(2, 3).sum(1).tolist() == [2, 2]


def test_two_levels_explode_warn_once_and_have_two_remedies(caplog):
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0]
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        stack = start_stack(method())
        for _ in range(3):
            a = stack.one("advantages", make_rollouts(rewards, group_size=3))
    assert a.tolist() == pytest.approx([1000, 0, 0, 0, 0, -1000])
    (message,) = caplog.messages
    assert "`scale: none`" in message and "`advantage_clip: 3`" in message and "+-1000" in message
    metrics = combine([stack.metrics.take()])
    assert metrics["mc_grpo/mad_zero"] == 1.0
    assert metrics["mc_grpo/max_abs_advantage"] == pytest.approx(1000)

    caplog.clear()
    for params, expected in (({"scale": "none"}, 1.0), ({"advantage_clip": 10}, 10.0)):
        a = start_stack(method(**params)).one("advantages", make_rollouts(rewards, group_size=3))
        assert a.tolist() == [expected, 0, 0, 0, 0, -expected]
    assert not caplog.messages


def test_no_warning_while_mad_is_zero_only_where_all_rewards_are_equal(caplog):
    stack = start_stack(method())
    stack.one("advantages", make_rollouts([1.0, 1.0, 1.0, 0.0, 1.0, 2.0], group_size=3))
    assert not caplog.messages
    assert combine([stack.metrics.take()])["mc_grpo/mad_zero"] == 0.5


def test_an_outlier_flips_signs_with_the_mean_but_not_with_the_median():
    rewards = [0.0, 1.0, 2.0, 3.0, 1e30]
    rollouts = make_rollouts(rewards, group_size=5)
    assert grpo_advantages(rollouts).sign().tolist() == [-1, -1, -1, -1, 1]
    stack = start_stack(method())
    assert stack.one("advantages", rollouts).sign().tolist() == [-1, -1, 0, 1, 1]
    assert combine([stack.metrics.take()])["mc_grpo/sign_changed"] == pytest.approx(1 / 5)  # the row with reward 3


def test_rows_without_a_reward_are_out_of_the_statistics_and_pivot_only_as_a_last_resort():
    rewards = [NAN, NAN, NAN, 5.0, NAN, NAN, 1.0, 2.0, 4.0]
    group = [0, 0, 0, 1, 1, 2, 2, 2, 2]
    decision = one_step(start_stack(method(scale="none")), make_rollouts(rewards, group))
    assert decision.row_advantages.tolist() == [0, 0, 0, 0, 0, 0, -1, 0, 2]
    trained = decision.trained.tolist()
    assert sum(trained[:3]) == 2
    assert trained[3:] == [False, True, True, True, False, True]


def test_a_group_of_one_keeps_its_row_with_a_warning(caplog):
    decision = one_step(start_stack(method()), make_rollouts([3.0, 0.0, 1.0, 5.0], [0, 1, 1, 1]))
    assert decision.trained.tolist()[0] and decision.row_advantages.tolist()[0] == 0
    assert any("a single row" in m for m in caplog.messages)


def test_equals_grpo_where_the_mean_is_the_median():
    rewards = [0.0, 1.0, 2.0, -3.0, 0.5, 4.0]
    rollouts = make_rollouts(rewards, group_size=3)
    assert advantages(rewards, scale="none") == grpo_advantages(rollouts, "none").tolist()
    expected = grpo_advantages(rollouts, "group", eps=1e-3).tolist()
    assert advantages(rewards, scale="std") == pytest.approx(expected, rel=1e-12)


def test_plan_asks_for_one_more_rollout_per_group():
    plan = method().plan(make_plan(prompts=3, group_size=4))
    assert [(r.n, r.spare) for r in plan.rows] == [(4, 1)] * 3
    assert plan.trained == 12 and plan.generated == 15

    shared = make_plan(prompts=0).replace(
        rows=(PlanRow(0, 0, 0), PlanRow(0, 0, 2, spare=3), PlanRow(5, 0, 2), PlanRow(1, 1, 0))
    )
    assert [r.spare for r in method().plan(shared).rows] == [0, 4, 0, 0]  # one pivot, so one more, and none for none


class Uneven(Method):
    """Trains i + 1 rollouts of prompt i, and withdraws the first row of the last group before the advantages."""

    name = "uneven"

    def plan(self, plan):
        return plan.replace(rows=tuple(r.replace(n=i + 1, spare=r.spare) for i, r in enumerate(plan.rows)))

    def select(self, rollouts):
        return (rollouts.group != rollouts.group.max()) | (rollouts.rollout > 0)


def generated(stack: MethodStack, prompts: int, group_size: int, seed: int = 0):
    """Rollouts as a host makes them for this stack's plan, with random rewards, in random order."""
    plan = first_plan(stack, range(prompts), group_size, prompts * group_size, None)
    group = [r.group for r in plan.rows for _ in range(r.n + r.spare)]
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(group), generator=generator).tolist()
    rewards = torch.randn(len(group), dtype=torch.float64, generator=generator)
    return make_rollouts(rewards, [group[i] for i in order])


@pytest.mark.parametrize("group_size", [1, 2, 3, 4, 8])
def test_exactly_the_hosts_group_size_stays_trained(group_size):
    stack = start_stack(method())
    rollouts = generated(stack, 6, group_size)
    assert len(rollouts) == 6 * (group_size + 1)
    decision = one_step(stack, rollouts, budget=6 * group_size)
    assert torch.bincount(rollouts.group[decision.trained]).tolist() == [group_size] * 6
    assert decision.estimator == "mc_grpo" and decision.uniform
    pivots = rollouts.reward[~decision.trained]
    assert sorted(pivots.tolist()) == sorted(rollouts.groups.median(rollouts.reward).tolist())
    token_rows = torch.repeat_interleave(torch.arange(len(rollouts)), rollouts.length)
    assert torch.equal(decision.keep_tokens, decision.trained[token_rows])
    expected = torch.tensor(oracle(rollouts.reward.tolist(), rollouts.group.tolist()), dtype=torch.float64)
    torch.testing.assert_close(decision.advantages, expected[token_rows], rtol=1e-9, atol=1e-12)
    metrics = combine([stack.metrics.take()])
    assert set(metrics) == {"mc_grpo/mad_zero", "mc_grpo/sign_changed", "mc_grpo/max_abs_advantage"}
    assert metrics["mc_grpo/max_abs_advantage"] == pytest.approx(float(expected.abs().max()))


@pytest.mark.parametrize("uneven_first", [True, False])
def test_together_with_a_method_that_plans_and_selects(uneven_first):
    methods = [Uneven(), method()] if uneven_first else [method(), Uneven()]
    stack = start_stack(*methods)
    rollouts = generated(stack, 3, 3)
    assert torch.bincount(rollouts.group).tolist() == [2, 3, 4]
    decision = one_step(stack, rollouts, budget=9)
    assert torch.bincount(rollouts.group[decision.trained]).tolist() == [1, 2, 2]
    out = (rollouts.group == 2) & (rollouts.rollout == 0)
    inside = rollouts.subset(~out)
    expected = oracle(inside.reward.tolist(), inside.group.tolist())
    assert decision.row_advantages[~out].tolist() == pytest.approx(expected, rel=1e-9)


def test_a_rollout_of_several_rows_leaves_as_a_whole():
    rewards = [0.0, 5.0, 1.0, 0.0, 5.0, 1.0]  # three rollouts of two rows each, interleaved; a second group of one
    rollouts = make_rollouts(
        [*rewards, 2.0, 2.0], [0] * 6 + [1] * 2, rollout=torch.tensor([0, 1, 2, 0, 1, 2, 0, 0]), lengths=[1] * 8
    )
    decision = one_step(start_stack(method(scale="none")), rollouts)
    assert decision.trained.tolist() == [True, True, False, True, True, False, True, True]
    assert decision.row_advantages.tolist() == [-1, 4, 0, -1, 4, 0, 0, 0]


def test_nothing_is_left_to_do_when_every_row_was_taken_out():
    rollouts = make_rollouts([1.0, 2.0, 3.0]).subset(torch.zeros(3, dtype=torch.bool))
    assert method(zero_compensation=True).advantages(rollouts).shape == (0,)


@pytest.mark.parametrize(
    ("values", "wrong"),
    [
        ({"mad_eps": 0}, "mad_eps"),
        ({"mad_eps": -1e-3}, "mad_eps"),
        ({"advantage_clip": 0}, "advantage_clip"),
        ({"scale": "iqr"}, "scale"),
        ({"zero_compensation": "maybe"}, "zero_compensation"),
        ({"extra_rollouts": 2}, "extra_rollouts"),
    ],
)
def test_parameters_out_of_range_are_named(values, wrong):
    with pytest.raises(ConfigError, match=f"mc_grpo.*{wrong}"):
        build_params(McGrpo.Params, values, "mc_grpo")


def test_is_found_by_name_and_decides_the_advantages_alone():
    stack = build_stack("mc_grpo", {"mc_grpo": {"mad_eps": "1e-2"}})
    assert stack.methods[0].params.mad_eps == 0.01
    assert stack.methods[0].claims() == ("plan", "advantages", "shape")
    with pytest.raises(ConfigError, match="both decide `advantages`"):
        build_stack("mc_grpo, gdpo")
