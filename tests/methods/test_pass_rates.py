"""MaxRL (arXiv 2602.02710) and PKPO (arXiv 2505.15201): plain loops, the authors' numbers, and what they reduce to."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.methods.max_rl import MaxRl
from rl_plugins.methods.pkpo import Pkpo
from rl_plugins.runtime.metrics import combine
from rl_plugins.testing import make_rollouts, one_step, start_stack

MAX_RL = Golden("max_rl")
PKPO = Golden("pkpo")
NAN = math.nan

value = st.one_of(st.sampled_from([0.0, 1.0, 1.0, NAN]), st.integers(-8, 16).map(lambda i: i / 8))
groups = st.lists(st.tuples(value, st.integers(0, 4)), min_size=1, max_size=20)


def advantages(method: Any, rewards: Any, group: Any) -> list[float]:
    return one_step(start_stack(method), make_rollouts(rewards, group)).row_advantages.tolist()


def by_group(rewards: list[float], group: list[int]) -> dict[int, list[int]]:
    """Rows with a reward."""
    return {g: [i for i, x in enumerate(rewards) if group[i] == g and x == x] for g in set(group)}


@settings(max_examples=25, deadline=None)
@given(rows=groups, eps=st.sampled_from([1e-6, 0.1]))
def test_max_rl_equals_the_loop(rows, eps):
    rewards, group = [r for r, _ in rows], [g for _, g in rows]
    expected = [0.0] * len(rows)
    for inside in by_group(rewards, group).values():
        values = [rewards[i] for i in inside]
        mean = sum(values) / max(1, len(values))
        if mean > 0 and max(values) > min(values):
            for i in inside:
                expected[i] = (rewards[i] - mean) / (mean + eps)
    assert advantages(MaxRl(MaxRl.Params(eps=eps)), rewards, group) == pytest.approx(expected, abs=1e-9)


def test_max_rl_of_one_success_in_four():
    method = MaxRl()
    stack = start_stack(method)
    decision = one_step(stack, make_rollouts([1.0, 0, 0, 0, -1, 0, 0, 0]))
    assert decision.row_advantages.tolist() == pytest.approx([3, -1, -1, -1, 0, 0, 0, 0], abs=1e-4)
    assert combine([stack.metrics.take()])["max_rl/groups_with_success"] == 0.5


@MAX_RL.kind("index")
def check_max_rl(case: Case) -> None:
    wanted = pytest.approx(case.expected["advantages"], abs=1e-5)  # float32
    method = MaxRl(MaxRl.Params(eps=case.params["eps"]))
    assert advantages(method, list(case.inputs["rewards"]), list(case.inputs["index"])) == wanted


@settings(max_examples=25, deadline=None)
@given(rows=groups, k=st.integers(2, 5))
def test_pkpo_equals_all_subsets(rows, k):
    rewards, group = [r for r, _ in rows], [g for _, g in rows]
    expected = [0.0] * len(rows)
    for inside in by_group(rewards, group).values():
        size = min(k, len(inside))
        if size < 2:
            continue
        subsets = list(itertools.combinations(inside, size))
        for subset, i in ((s, i) for s in subsets for i in s):
            gain = max(rewards[j] for j in subset) - max(rewards[j] for j in subset if j != i)
            expected[i] += len(inside) * gain / len(subsets)
    assert advantages(Pkpo(Pkpo.Params(k=k)), rewards, group) == pytest.approx(expected, abs=1e-9)


@PKPO.kind("rewards")
def check_pkpo(case: Case) -> None:
    rewards = list(case.inputs["rewards"])
    wanted = [len(rewards) * s for s in case.expected["s_loo_minus_one"]]
    assert advantages(Pkpo(Pkpo.Params(k=case.params["k"])), rewards, [0] * len(rewards)) == pytest.approx(wanted)


def test_pkpo_logs_an_unbiased_estimate_of_the_best_of_k():
    rewards = [0.2, 1.0, 0.5, 0.0, 0.7]
    stack = start_stack(Pkpo(Pkpo.Params(k=3)))
    one_step(stack, make_rollouts(rewards, [0] * 5))
    best = [max(s) for s in itertools.combinations(rewards, 3)]
    assert combine([stack.metrics.take()])["pkpo/best_of_k"] == pytest.approx(sum(best) / len(best))


def test_pkpo_of_the_whole_group_gives_its_best_the_lead_over_the_second():
    """verl's `grpo_passk` without the deviation, times the group's size; of two equal best ones nobody leads."""
    got = advantages(Pkpo(Pkpo.Params(k=8)), [0.1, 0.9, 0.4, 0.6, 1.0, 1.0, 0.0, 0.0], [0] * 4 + [1] * 4)
    assert got == pytest.approx([0, 4 * 0.3, 0, 0, 0, 0, 0, 0])


def test_pkpo_of_large_groups_is_exact():
    """C(512, 256) does not fit into a float64, and its shares do."""
    rewards = torch.zeros(1024)
    rewards[:4] = 1.0
    got = torch.tensor(advantages(Pkpo(Pkpo.Params(k=256)), rewards, [0] * 1024), dtype=torch.float64)
    alone = math.exp(math.lgamma(1021) - math.lgamma(766) - math.lgamma(1025) + math.lgamma(769)) * 256
    assert got[:4].tolist() == pytest.approx([1024 * alone] * 4, rel=1e-9) and not bool(got[4:].any())


@pytest.mark.parametrize("method", [MaxRl(), Pkpo()], ids=["max_rl", "pkpo"])
def test_a_rollout_of_several_rows_counts_once(method):
    rewards, rollout = [1.0, 1.0, 1.0, 0.0, 0.0], torch.tensor([0, 0, 0, 1, 2])
    index = torch.tensor([0, 1, 2, 0, 0])
    rollouts = make_rollouts(rewards, [0] * 5, rollout=rollout, index=index)
    once = advantages(method, [1.0, 0.0, 0.0], [0] * 3)
    got = one_step(start_stack(type(method)()), rollouts).row_advantages.tolist()
    assert got == pytest.approx([once[0]] * 3 + once[1:])


@pytest.mark.parametrize("case", MAX_RL.cases, ids=str)
def test_golden_max_rl(case: Case) -> None:
    MAX_RL.check(case)


@pytest.mark.parametrize("case", PKPO.cases, ids=str)
def test_golden_pkpo(case: Case) -> None:
    PKPO.check(case)


def test_further_golden_cases() -> None:
    MAX_RL.check_further_cases()
    PKPO.check_further_cases()
