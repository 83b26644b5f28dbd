"""What leaves a batch: `variance_filter` (RAGEN-2), `gfpo` and `overlong` (DAPO), against plain loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import raises

from rl_plugins.core.errors import ConfigError
from rl_plugins.methods.gfpo import Gfpo
from rl_plugins.methods.overlong import Overlong
from rl_plugins.methods.variance_filter import VarianceFilter
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_plan, make_rollouts, make_run, one_step, start_stack

GOLDEN = Golden("variance_filter")
NAN = math.nan

value = st.one_of(st.sampled_from([0.0, 1.0, 1.0, NAN]), st.integers(-8, 16).map(lambda i: i / 8))
batches = st.lists(st.tuples(value, st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=20)


# ---- variance_filter


def deviation(values: list[float]) -> float:
    known = [x for x in values if x == x]
    if len(known) < 2:
        return 0.0
    mean = sum(known) / len(known)
    return math.sqrt(sum((x - mean) ** 2 for x in known) / (len(known) - 1))


@settings(max_examples=25, deadline=None)
@given(rows=batches, share=st.sampled_from([0.3, 0.9, 1.0]), power=st.sampled_from([1, 2]))
def test_the_filter_equals_the_loop(rows, share, power):
    rewards, group = [r for r, *_ in rows], [g for _, g, _ in rows]
    ids = sorted(set(group))
    v = {g: deviation([r for r, of in zip(rewards, group, strict=True) if of == g]) ** power for g in ids}
    total, so_far, kept = sum(v.values()), 0.0, []
    for g in sorted(ids, key=lambda g: -v[g]):  # stable
        if so_far >= share * total - 0.01 or v[g] <= 0:
            break
        so_far += v[g]
        kept.append(g)
    params = VarianceFilter.Params(share=share, spread="variance" if power == 2 else "deviation")
    got = one_step(start_stack(VarianceFilter(params)), make_rollouts(rewards, group)).rollouts.kept.tolist()
    assert got == [g in kept for g in group]


@GOLDEN.kind("groups")
def check_filter(case: Case) -> None:
    groups = [list(g) for g in case.inputs["groups"]]
    rewards, group = [x for g in groups for x in g], [k for k, g in enumerate(groups) for _ in g]
    rollouts = make_rollouts(rewards, group)
    decision = one_step(start_stack(VarianceFilter(case.build(VarianceFilter))), rollouts)
    assert sorted(set(rollouts.group[decision.rollouts.kept].tolist())) == list(case.expected["kept"])


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


def test_the_filter_says_how_much_spread_stays():
    stack = start_stack(VarianceFilter(VarianceFilter.Params(share=0.5)))
    one_step(stack, make_rollouts([0.0, 2, 0, 2, 0, 1, 0, 1, 1, 1, 1, 1]))
    logged = combine([stack.metrics.take()])
    assert logged["variance_filter/kept"] == pytest.approx(1 / 3)
    assert logged["variance_filter/kept_spread"] == pytest.approx(2 / 3)


def test_what_left_before_has_no_spread():
    rollouts = make_rollouts([0.0, 1, 1, 1, 1, 0, 1, 1])
    left = rollouts.replace(kept=torch.arange(8) != 0)
    assert VarianceFilter().select(left).tolist() == [False] * 4 + [True] * 4


# ---- gfpo


@settings(max_examples=25, deadline=None)
@given(rows=batches, metric=st.sampled_from(["efficiency", "length"]))
def test_gfpo_equals_the_loop(rows, metric):
    """Groups that no plan knows keep half of their rollouts."""
    rewards, group, lengths = zip(*rows, strict=True)
    keep = [False] * len(rows)
    for g in set(group):
        inside = [i for i, of in enumerate(group) if of == g]
        score = {i: rewards[i] / lengths[i] if metric == "efficiency" else -lengths[i] for i in inside}
        order = sorted(inside, key=lambda i: (rewards[i] != rewards[i], -score[i] if rewards[i] == rewards[i] else 0))
        for i in order[: len(inside) // 2]:
            keep[i] = True
    method = Gfpo(Gfpo.Params(metric=metric))
    rollouts = make_rollouts(list(rewards), list(group), lengths=list(lengths))
    assert one_step(start_stack(method), rollouts).rollouts.kept.tolist() == keep


def test_gfpo_trains_as_many_as_were_planned_and_compares_them_alone():
    stack = start_stack(Gfpo(Gfpo.Params(oversample=1.5, metric="length")))
    plan = stack.call("plan", stack.methods[0], make_plan(2, 4))
    assert [(row.n, row.spare) for row in plan.rows] == [(4, 2)] * 2
    rollouts = make_rollouts([1.0, 0, 0, 1, 1, 1, *[NAN] * 3, 0, 1, 0], group_size=6, lengths=[1, 2, 3, 4, 5, 6] * 2)
    decision = one_step(stack, rollouts, budget=8)
    assert decision.rollouts.kept.tolist() == [True] * 4 + [False] * 2 + [True, False, False, True, True, True]
    half = decision.row_advantages[:4]
    assert half[0] == half[3] == -half[1] == -half[2] > 0
    logged = combine([stack.metrics.take()])
    assert logged["gfpo/kept_length"] == (1 + 2 + 3 + 4 + 1 + 4 + 5 + 6) / 8 and logged["gfpo/length"] == 3.5


# ---- overlong


def overlong(**params: Any) -> Any:
    return start_stack(Overlong(Overlong.Params(**params)), run=make_run(max_completion_length=12))


def test_cut_off_completions_have_no_loss_and_stay_in_the_statistics():
    rollouts = make_rollouts([1.0, 0, 0, 0], lengths=[12, 4, 12, 3], truncated=torch.tensor([True, False, True, False]))
    stack = overlong()
    decision = one_step(stack, rollouts)
    assert decision.trained.tolist() == [False, True, False, True] and bool(decision.rollouts.kept.all())
    assert decision.row_advantages[1] == pytest.approx(-0.25 / (0.5 + 1e-4))
    assert combine([stack.metrics.take()])["overlong/truncated"] == 0.5
    everything = rollouts.replace(truncated=torch.ones(4, dtype=torch.bool))
    assert not bool(one_step(overlong(), everything).trained.any())


def test_the_punishment_is_dapos():
    """Equation 13: 0 up to M - B tokens, -1 from M on, a line between."""
    lengths = [1, 8, 9, 10, 12, 12]
    rollouts = make_rollouts([1.0, 1, 1, 1, 1, NAN], [0] * 6, lengths=lengths)
    stack = overlong(filter=False, buffer=4, penalty=0.5)
    decision = one_step(stack, rollouts)
    lost = [0.0 if n <= 8 else (n - 8) / 4 for n in lengths]
    expected = [1 - 0.5 * x for x in lost[:5]]
    assert decision.rollouts.reward[:5].tolist() == pytest.approx(expected)
    assert bool(torch.isnan(decision.rollouts.reward[5])) and bool(decision.stays.all())
    assert combine([stack.metrics.take()])["overlong/punished"] == pytest.approx(4 / 6)


def test_overlong_without_effect_is_refused():
    with raises(ConfigError, match="`filter` is false"):
        build_stack(["overlong"], {"overlong": {"filter": False}})
    with raises(ConfigError, match="`buffer` is 13"):
        overlong(buffer=13)
