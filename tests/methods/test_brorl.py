"""BroRL (arXiv 2510.01180): advantages against a loop, the ramp, the learning-rate rule, the mass balance."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import method

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.groups import Groups
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Completion, Plan, PlanRow, Rollouts, Update
from rl_plugins.methods.brorl import BroRL, answer_statistics, group_size, lr_factor
from rl_plugins.methods.v0 import V0
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.update import before_update
from rl_plugins.testing import (
    make_plan,
    make_rollouts,
    make_rows,
    make_run,
    make_tokens,
    one_step,
    start_stack,
)

GOLDEN = Golden("brorl")
with pytest.MonkeyPatch.context() as patch:  # the theorem is in the evidence script
    patch.syspath_prepend(Path(__file__).parents[2] / "examples" / "evidence")
    from brorl import mass_balance, share_trained
NAN = math.nan


def brorl(**params: Any) -> BroRL:
    return BroRL(build_params(BroRL.Params, params, "brorl"))


def texts(n: int) -> list[str]:
    return [f"answer {i}" for i in range(n)]


def rollouts_of(rewards: Any, group: Any = None, **changes: Any) -> Rollouts:
    made = make_rollouts(rewards, group, **changes)
    return made if made.text is not None else made.replace(text=texts(len(made)))


def decided(rewards: Any, group: Any = None, lengths: Any = None, **params: Any) -> Any:
    """The decision on one batch, through the driver, and what was logged."""
    stack = start_stack(brorl(**params))
    decision = one_step(stack, rollouts_of(rewards, group, lengths=lengths))
    return decision, combine([stack.metrics.take()])


# ---- advantages and dynamic sampling


def loop(rewards, group, lengths, norm_over, eps, dynamic_sampling):
    """Which rows stay and their advantages, in Python floats."""
    keep, centered = [True] * len(rewards), [NAN] * len(rewards)
    scored = {g: [r for r, h in zip(rewards, group, strict=True) if h == g and r == r] for g in group}
    for i, (r, g) in enumerate(zip(rewards, group, strict=True)):
        unequal = len(set(scored[g])) > 1
        keep[i] = unequal or not dynamic_sampling
        if keep[i] and r == r:
            centered[i] = r - math.fsum(scored[g]) / len(scored[g]) if unequal else 0.0
    inside = [i for i, c in enumerate(centered) if c == c]
    if not inside or norm_over == "none":
        return keep, [0.0 if c != c else c for c in centered]
    repeated = [centered[i] for i in inside for _ in range(lengths[i] if norm_over == "token" else 1)]
    mean = math.fsum(repeated) / len(repeated)
    variance = math.fsum((c - mean) ** 2 for c in repeated) / max(len(repeated) - 1, 1)
    scale = math.sqrt(variance + eps) if norm_over == "token" else math.sqrt(variance) + eps
    return keep, [
        (c - mean) / scale if c == c and len(scored[g]) > 1 else 0.0 for c, g in zip(centered, group, strict=True)
    ]


@settings(max_examples=60, deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.sampled_from([0.0, 1.0, 1.0, 0.25, -2.0, NAN]), st.integers(0, 4), st.integers(1, 5)),
        min_size=1,
        max_size=24,
    ).filter(lambda rows: any(r == r for r, _, _ in rows)),
    norm_over=st.sampled_from(["trajectory", "token", "none"]),
    eps=st.sampled_from([1e-8, 0.1]),
    dynamic_sampling=st.booleans(),
)
def test_equals_the_loop(rows, norm_over, eps, dynamic_sampling):
    rewards, group, lengths = (list(x) for x in zip(*rows, strict=True))
    params = {} if norm_over == "none" else {"eps": eps}
    found, _ = decided(rewards, group, lengths, norm_over=norm_over, dynamic_sampling=dynamic_sampling, **params)
    keep, wanted = loop(rewards, group, lengths, norm_over, eps, dynamic_sampling)
    assert found.rollouts.kept.tolist() == keep
    expected = [a if k else 0.0 for a, k in zip(wanted, keep, strict=True)]
    assert found.row_advantages.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_over_tokens_it_is_the_estimator_of_verl():
    core = pytest.importorskip("verl.trainer.ppo.core_algos")
    rewards, group, lengths = (
        [1.0, 0.0, 0.5, 0.0, 0.0, 1.0, 1.0, 0.25],
        [0, 0, 0, 1, 1, 1, 1, 1],
        [1, 5, 2, 4, 3, 1, 6, 2],
    )
    mask = (torch.arange(6)[None] < torch.tensor(lengths)[:, None]).double()
    scores = torch.zeros(8, 6, dtype=torch.float64)
    scores[torch.arange(8), torch.tensor(lengths) - 1] = torch.tensor(rewards, dtype=torch.float64)
    theirs = core.compute_reinforce_plus_plus_baseline_outcome_advantage(scores, mask, np.array(group))[0]
    found, _ = decided(rewards, group, lengths, norm_over="token")
    assert found.row_advantages.tolist() == pytest.approx(theirs[:, 0].tolist(), rel=1e-6)
    by_trajectory, _ = decided(rewards, group, lengths)
    assert float((by_trajectory.row_advantages - found.row_advantages).abs().max()) > 0.1


def test_without_a_division_and_a_filter_it_is_grpo():
    rewards = [1.0, 0.0, 0.0, 1.0, 0.5, 0.5, 0.5, 0.5, 1.0, 0.0, 0.0, 0.0]
    rollouts = rollouts_of(rewards)
    plain = one_step(MethodStack([]), rollouts, make_tokens(rollouts))
    assert plain.estimator == "rl_plugins"
    found, _ = decided(rewards, norm_over="none", dynamic_sampling=False)
    assert torch.equal(found.row_advantages, grpo_advantages(rollouts, "none"))
    assert bool(found.trained.all())
    own = brorl()
    assert own.plan(make_plan()) is None
    assert own.before_update(make_rows(rollouts, make_tokens(rollouts))) == Update()


def test_shift_of_one_prompts_rewards_changes_nothing():
    rewards = [1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 0.0]
    moved = [r + 40 if i < 4 else r for i, r in enumerate(rewards)]
    for norm_over in ("trajectory", "token"):
        one, two = (decided(r, norm_over=norm_over)[0].row_advantages for r in (rewards, moved))
        assert one.tolist() == pytest.approx(two.tolist(), abs=1e-12)


def test_only_groups_of_equal_rewards_leave():
    rewards = [1.0] * 4 + [0.0] * 4 + [0.5, 0.5, 0.5, 0.75] + [NAN, NAN, NAN, 1.0] + [NAN, 0.0, 1.0, NAN] + [NAN] * 4
    found, logged = decided(rewards)
    assert found.rollouts.kept.tolist() == [False] * 8 + [True] * 4 + [False] * 4 + [True] * 4 + [False] * 4
    assert logged["brorl/signal"] == pytest.approx(2 / 5)  # the last group has no reward at all
    assert logged["brorl/success"] == pytest.approx((1 + 0 + 1 + 1 + 0.5) / 5)
    assert found.row_advantages[[16, 19]].tolist() == [0.0, 0.0]
    # rounding of equal rewards is no signal
    found, _ = decided([0.1 + 1e-9, 0.1, 0.1, 0.1, 1.0, 0.0, 0.0, 0.0])
    assert found.rollouts.kept.tolist() == [False] * 4 + [True] * 4


def test_a_batch_without_signal_has_zeros():
    for norm_over in ("trajectory", "token", "none"):
        found, logged = decided([0.1] * 4 + [0.7] * 4, norm_over=norm_over, dynamic_sampling=False)
        assert found.row_advantages.tolist() == [0.0] * 8
        assert logged["brorl/signal"] == 0.0
        found, _ = decided([0.1] * 4 + [0.7] * 4, norm_over=norm_over)
        assert not bool(found.trained.any())


def test_groups_of_one_are_zero_over_tokens_too():
    rewards, group, lengths = [1.0, 0.0, 5.0, 0.0, NAN], [0, 0, 1, 2, 2], [1, 9, 3, 2, 2]
    for norm_over in ("trajectory", "token"):
        found, _ = decided(rewards, group, lengths, norm_over=norm_over, dynamic_sampling=False)
        assert found.row_advantages[2:].tolist() == [0.0] * 3
    # the mean over tokens is -2 / 15, of the other two it is -4 / 10 and is taken off
    tokens = [0.5] + [-0.5] * 9 + [0.0] * 5
    mean, spread = np.mean(tokens), np.std(tokens, ddof=1)
    assert found.row_advantages[:2].tolist() == pytest.approx([(0.5 - mean) / spread, (-0.5 - mean) / spread])


def test_a_rollout_of_several_rows_counts_once():
    rewards = [1.0, 1.0, 1.0, 0.0, 1.0, 0.0]
    rollout, index = torch.tensor([0, 0, 0, 1, 0, 1]), torch.tensor([0, 1, 2, 0, 0, 0])
    lengths = [2, 2, 2, 3, 3, 3]
    for norm_over in ("trajectory", "token"):
        stack = start_stack(brorl(norm_over=norm_over))
        several = one_step(
            stack, rollouts_of(rewards, [0, 0, 0, 0, 1, 1], rollout=rollout, index=index, lengths=lengths)
        )
        once, _ = decided([1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1], [6, 3, 3, 3], norm_over=norm_over)
        a = once.row_advantages.tolist()
        assert several.row_advantages.tolist() == pytest.approx([a[0]] * 3 + a[1:])
        assert combine([stack.metrics.take()])["brorl/distinct_answers"] == 2.0


def test_rows_that_left_before_are_in_no_statistic():
    first = method("first", select=lambda r: r.group > 0)
    stack = start_stack(first, brorl())
    rollouts = rollouts_of([9.0, 0.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0])
    found = one_step(stack, rollouts)
    assert found.rollouts.kept.tolist() == [False] * 4 + [True] * 4 + [False] * 4
    alone, _ = decided([1.0, 0.0, 0.0, 0.0])
    assert found.row_advantages[4:8].tolist() == pytest.approx(alone.row_advantages.tolist())
    assert combine([stack.metrics.take()])["brorl/signal"] == 0.5


# ---- what is logged


def test_answers_are_counted_per_group():
    made = ["4", "4 ", "5", "6", "7", "7", "7", "7"]
    stack = start_stack(brorl(dynamic_sampling=False))
    one_step(stack, rollouts_of([1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0], text=made))
    logged = combine([stack.metrics.take()])
    assert logged["brorl/distinct_answers"] == pytest.approx((3 + 1) / 2)
    assert logged["brorl/unseen_mass"] == pytest.approx((2 / 4 + 0) / 2)
    assert logged["brorl/group_size"] == 4.0


def test_an_answer_function_may_find_none():
    stack = start_stack(brorl(answer=lambda text: [text[-1]] if text[-1] != "?" else None))
    made = ["a 1", "b 1", "c 2", "d ?", "?", "?", "?", "?"]
    one_step(stack, rollouts_of([1.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0], text=made))
    logged = combine([stack.metrics.take()])
    assert logged["brorl/distinct_answers"] == pytest.approx(2.0)  # the other group has no answer at all
    assert logged["brorl/unseen_mass"] == pytest.approx(1 / 3)


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, "a", "b", "c", "d"])), min_size=1, max_size=20)
)
def test_answer_statistics_equal_the_loop(rows):
    groups = Groups(torch.tensor([g for g, _ in rows]))
    distinct, unseen = answer_statistics(groups, [a for _, a in rows])
    for i, g in enumerate(groups.ids.tolist()):
        own = [a for h, a in rows if h == g and a is not None]
        if not own:
            assert math.isnan(distinct[i]) and math.isnan(unseen[i])
            continue
        assert float(distinct[i]) == len(set(own))
        assert float(unseen[i]) == pytest.approx(sum(own.count(a) == 1 for a in set(own)) / len(own))


def test_good_turing_estimates_the_unseen_mass():
    """In the mean over many groups it is the probability of what a group, but for one draw, did not find."""
    rng = np.random.default_rng(0)
    p = rng.dirichlet([0.3] * 50)
    draws = rng.choice(50, size=(2000, 16), p=p)
    group = torch.arange(2000).repeat_interleave(16)
    _, unseen = answer_statistics(Groups(group), draws.flatten().tolist())
    true = [1 - p[np.unique(d[:-1])].sum() for d in draws]
    assert float(unseen.mean()) == pytest.approx(np.mean(true), abs=0.01)


# ---- the ramp


def planned(stack: MethodStack, batch: int, prompts: int = 8, size: int = 4) -> Plan:
    stack.batch = batch
    return first_plan(stack, list(range(prompts)), size, prompts * size, 1000)


def test_a_ramp_plans_fewer_prompts_of_more_rollouts():
    stack = start_stack(brorl(ramp=[[2, 8], [4, 16]]))
    for batch, n in ((0, 4), (1, 4), (2, 8), (3, 8), (4, 16), (9, 16)):
        plan = planned(stack, batch)
        assert [row.n for row in plan.rows] == [n] * (32 // n)
        assert [row.prompt_index for row in plan.rows] == list(range(32 // n))
        assert plan.budget == 0


def test_a_ramp_to_fewer_rollouts_takes_further_prompts():
    plan = planned(start_stack(brorl(ramp=[[0, 2]])), 0)
    assert [row.n for row in plan.rows] == [2] * 16
    assert len({row.prompt_index for row in plan.rows}) == 16


def test_what_a_group_does_not_fill_stays_empty():
    plan = planned(start_stack(brorl(ramp=[[0, 12]])), 0)
    assert [row.n for row in plan.rows] == [12, 12] and plan.budget == 8
    plan = planned(start_stack(brorl(ramp=[[0, 32]])), 0)
    assert [row.n for row in plan.rows] == [32]


def test_a_group_that_does_not_fit_is_refused_with_the_numbers():
    stack = start_stack(brorl(ramp=[[3, 33]]))
    planned(stack, 2)
    with pytest.raises(MethodError, match="`ramp` asks for 33 rollouts per prompt, and a batch has room for 32 rows"):
        planned(stack, 3)


def test_given_completions_and_spare_rollouts_stay():
    own = brorl(ramp=[[0, 8]])
    replayed = PlanRow(5, 0, 4, given=(Completion((1,)),) * 4)
    fresh = tuple(PlanRow(i, i, 4, spare=1) for i in range(1, 6))
    only_spare = PlanRow(9, 9, 0, spare=3)
    plan = own.plan(Plan((replayed, *fresh, only_spare), 4, 24))
    assert plan is not None
    assert [row.n for row in plan.rows] == [4, 8, 8, 0, 0, 0, 0]
    assert [row.spare for row in plan.rows] == [0, 1, 1, 1, 1, 1, 3]
    assert own.plan(Plan((only_spare,), 4, 24)) is None


def test_a_ramp_decides_rollouts_and_the_hosts_number_does_not():
    assert not brorl().decides_rollouts and brorl(ramp=[[0, 8]]).decides_rollouts
    MethodStack([V0(), brorl(norm_over="none")])
    with pytest.raises(ConfigError, match="`v0` and `brorl`"):
        MethodStack([V0(), brorl(ramp=[[0, 8]])])


@pytest.mark.parametrize(
    ("ramp", "message"),
    [
        ([[0, 8, 1]], r"has the entry \[0, 8, 1\]; each must be two whole numbers"),
        ([[0, 1]], "rollouts per prompt from 2"),
        ([[-1, 8]], "a generation batch from 0"),
        ([[4, 8], [4, 16]], "has batch 4 after batch 4; batches must ascend"),
        ([[0, 8.5]], "a whole number"),
    ],
)
def test_ramps_that_cannot_be(ramp, message):
    with pytest.raises(ConfigError, match=message):
        brorl(ramp=ramp)


def test_group_size_before_and_within_a_ramp():
    ramp = ((2, 8), (4, 16))
    assert [group_size(ramp, b) for b in range(6)] == [None, None, 8, 8, 16, 16]


def test_a_ramp_beyond_the_batch_ends_the_run_in_its_first_batch():
    stack = start_stack(brorl(ramp=[[5, 17]]))
    with pytest.raises(MethodError, match="`ramp` asks for 17 rollouts per prompt, and a batch has room for 16 rows"):
        first_plan(stack, [0, 1, 2, 3], 4, 16, 16)


# ---- the learning rate


def test_factor_of_the_paper():
    base = card_file("brorl").paper_params["N = 512"]["base_rows"]
    settings_ = card_file("brorl").paper_settings["verl"]
    rows = settings_["data.train_batch_size"] * settings_["actor_rollout_ref.rollout.n"]
    assert lr_factor(rows, base, "sqrt") == pytest.approx(2.83, abs=0.01)
    assert lr_factor(512, 16, "linear") == 32.0
    assert lr_factor(512, 16, "none") == 1.0
    assert lr_factor(16, 16, "sqrt") == 1.0 and lr_factor(4, 16, "sqrt") == 0.5


def test_factor_of_an_optimizer_step_counts_the_rows_of_all_ranks_that_are_trained():
    for rule, wanted in (("sqrt", 2.0), ("linear", 4.0), ("none", 1.0)):
        stack = start_stack(brorl(base_rows=2, lr_scale=rule))
        rollouts = rollouts_of([1.0, 0.0, 0.0, 0.0] * 3, lengths=[1, 2, 3, 4, 1, 2, 3, 4, 0, 0, 0, 0])
        rows = make_rows(rollouts, make_tokens(rollouts))
        assert before_update(stack, [rows], 0).lr_scale == wanted
        assert combine([stack.metrics.take()])["brorl/lr_scale"] == wanted
        half = rollouts.subset(rollouts.group < 1), rollouts.subset(rollouts.group >= 1)
        parts = [make_rows(r, make_tokens(r)) for r in half]
        assert before_update(stack, parts, 1).lr_scale == wanted


def test_without_base_rows_the_rate_is_the_hosts():
    stack = start_stack(brorl())
    rollouts = rollouts_of([1.0, 0.0, 0.0, 0.0])
    assert before_update(stack, [make_rows(rollouts, make_tokens(rollouts))], 0).lr_scale == 1.0
    assert "brorl/lr_scale" not in combine([stack.metrics.take()])
    with pytest.raises(ConfigError, match="`lr_scale` has no effect"):
        brorl(lr_scale="linear")


def test_a_step_without_a_trained_row():
    stack = start_stack(brorl(base_rows=2))
    rollouts = rollouts_of([1.0, 0.0], [0, 0], lengths=[0, 0])
    assert before_update(stack, [make_rows(rollouts, make_tokens(rollouts))], 0).lr_scale == 1.0


# ---- the mass balance


@GOLDEN.kind("sampled")
def check_mass_balance(case: Case) -> None:
    p = torch.tensor(case.inputs["p"], dtype=torch.float64)
    correct, sampled = (torch.tensor(case.inputs[name]) for name in ("positive", "sampled"))
    case.params["N"]  # eta_over_N is used as it is
    values = {"right": case.params["R_c"], "wrong": case.params["R_w"], "eta_over_n": case.params["eta_over_N"]}
    found = mass_balance(p, correct, sampled, **values)
    wanted = {
        "S_R": found.reward,
        "sampled_correct_term": found.sampled_correct,
        "sampled_wrong_term": found.sampled_wrong,
        "unsampled_term": found.unsampled,
        "delta_Q_pos": found.total,
    }
    for name, value in wanted.items():
        assert float(value) == pytest.approx(case.expected[name], rel=1e-12, abs=1e-15), name
    assert float(found.total) == pytest.approx(case.expected["finite_difference"], abs=1e-7)
    assert difference(p, correct, found.step) == pytest.approx(float(found.total), abs=1e-7)


@GOLDEN.kind("rewards")
def check_normalization(case: Case) -> None:
    """Groups without a signal leave, then the step over the batch, with the divisor n - 1; that of n is a factor."""
    rewards, wanted = case.inputs["rewards"], case.expected
    assert {len(r) for r in rewards} == {case.params["N"]}
    group = [g for g, r in enumerate(rewards) for _ in r]
    flat = [float(x) for r in rewards for x in r]
    centered, _ = decided(flat, group, norm_over="none")
    kept = centered.rollouts.kept.tolist()
    assert sorted({g for g, k in zip(group, kept, strict=True) if k}) == wanted["kept"]
    inside = [i for i, k in enumerate(kept) if k]
    assert centered.row_advantages[inside].tolist() == pytest.approx(wanted["centered"], abs=1e-12)
    found, _ = decided(flat, group)
    values = found.row_advantages[inside]
    assert values.tolist() == pytest.approx(wanted["advantage_ddof1"], abs=1e-7)
    n = len(inside)
    assert (values * math.sqrt(n / (n - 1))).tolist() == pytest.approx(wanted["advantage_ddof0"], abs=1e-7)


@GOLDEN.kind("samples_k")
def check_refill(case: Case) -> None:
    """Table 1 says how many rows were sampled, and table 2 which share dynamic sampling kept: the steps trained their
    full number of rows, so batches were filled again."""
    given_, wanted = case.inputs, case.expected
    rows = zip(*(given_[name] for name in ("steps", "prompts", "N", "samples_k")), strict=True)
    found = [share_trained(s, p, n, 1000 * k) for s, p, n, k in rows]
    assert found == pytest.approx(wanted["share_trained"], rel=1e-9)
    for n, share in wanted["table2_pass_rate"].items():
        of_n = [f for f, m in zip(found, given_["N"], strict=True) if m == int(n)]
        assert of_n == pytest.approx([share] * len(of_n), abs=0.011)
    assert set(map(str, given_["N"])) == set(wanted["table2_pass_rate"])


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


def difference(p: torch.Tensor, correct: torch.Tensor, step: torch.Tensor, h: float = 1e-6) -> float:
    """Slope of the correct mass along `step`, from two softmaxes."""
    mass = [torch.softmax(p.log() + s * h * step, -1)[correct].sum() for s in (1, -1)]
    return float((mass[0] - mass[1]) / (2 * h))


@st.composite
def places(draw: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    n = draw(st.integers(2, 12))
    weights = np.array(draw(st.lists(st.floats(0.01, 1), min_size=n, max_size=n)))
    masks = [torch.tensor(draw(st.lists(st.booleans(), min_size=n, max_size=n))) for _ in range(2)]
    return torch.from_numpy(weights / weights.sum()), masks[0], masks[1]


@settings(max_examples=60, deadline=None)
@given(place=places(), right=st.floats(0, 2), wrong=st.floats(-2, 0), eta=st.sampled_from([1.0, 0.1]))
def test_mass_balance_is_the_derivative_and_sampled_terms_never_hurt(place, right, wrong, eta):
    p, correct, sampled = place
    found = mass_balance(p, correct, sampled, right, wrong, eta)
    assert float(found.sampled_correct) >= 0 and float(found.sampled_wrong) >= 0
    assert float(found.total) == pytest.approx(difference(p, correct, found.step), abs=1e-7)
    logits = p.log().requires_grad_()
    surrogate = (torch.softmax(logits, -1) * torch.where(sampled, torch.where(correct, right, wrong), 0.0)).sum()
    (gradient,) = torch.autograd.grad(surrogate, logits)
    assert torch.allclose(found.step, eta * gradient, atol=1e-12)
    everything = mass_balance(p, correct, torch.ones_like(sampled), right, wrong, eta)
    assert float(everything.unsampled) == 0.0 and float(everything.total) >= 0


def test_mass_balance_of_many_places_at_once():
    rng = np.random.default_rng(0)
    p = torch.from_numpy(rng.dirichlet([0.5] * 9, size=(3, 4)))
    correct, sampled = (torch.from_numpy(rng.random((3, 4, 9)) < 0.4) for _ in range(2))
    found = mass_balance(p, correct, sampled)
    assert found.total.shape == (3, 4) and found.step.shape == (3, 4, 9)
    one = mass_balance(p[1, 2], correct[1, 2], sampled[1, 2])
    assert float(found.total[1, 2]) == pytest.approx(float(one.total), abs=1e-15)
    assert torch.allclose(found.step[1, 2], one.step)


def test_mass_balance_refuses_what_is_no_distribution():
    p, mask = torch.tensor([0.5, 0.6]), torch.tensor([True, False])
    with pytest.raises(ValueError, match="p sums to 1.1; probabilities"):
        mass_balance(p, mask, mask)
    with pytest.raises(ValueError, match=r"are \(2,\), \(1,\) and \(2,\); they must have the same shape"):
        mass_balance(p, mask[:1], mask)


# ---- in a run


def test_a_run_of_single_rollouts_is_refused():
    hooks = ("plan", "select", "advantages", "before_update")
    run = make_run(group_size=1)
    capabilities = HostCapabilities("trl", "0", hooks, {}, (), {}, None, {}, run=run, group_option="num_generations")
    with pytest.raises(ConfigError, match="`brorl` needs two or more rollouts per prompt.*num_generations=1"):
        preflight(build_stack(["brorl"]), capabilities)


def test_tokens_of_a_row_without_a_reward_do_not_count():
    rollout, index = torch.tensor([0, 0, 1, 0, 1]), torch.tensor([0, 1, 0, 0, 0])
    group = [0, 0, 0, 1, 1]
    rewards = [1.0, NAN, 0.0, 1.0, 0.5]
    stack = start_stack(brorl(norm_over="token"))
    found = one_step(stack, rollouts_of(rewards, group, rollout=rollout, index=index, lengths=[2, 50, 3, 3, 3]))
    once, _ = decided([1.0, 0.0, 1.0, 0.5], [0, 0, 1, 1], [2, 3, 3, 3], norm_over="token")
    a = once.row_advantages.tolist()
    assert found.row_advantages.tolist() == pytest.approx([a[0], 0.0, *a[1:]])
