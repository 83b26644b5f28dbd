"""V_0 (arXiv 2602.03584): utility, budgets against brute force, predictions, the value model's loss, and the driver."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Completion, Plan, PlanRow
from rl_plugins.methods.v0 import V0, allocate_exact, allocate_greedy, auc, utility
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_plan, make_rollouts, make_run, one_step, start_stack

GOLDEN = Golden("v0")
NAN = math.nan
PROMPTS = 16


class Table:
    """A dataset whose prompts are alike within two families."""

    column_names = ["prompt", "rate"]

    def __init__(self, rates: Any = None) -> None:
        self.rates = [0.5] * PROMPTS if rates is None else list(rates)

    def __len__(self) -> int:
        return PROMPTS

    def __getitem__(self, i: int) -> dict[str, Any]:
        family = "translate this poem into French" if i % 2 else "prove that the sum is even"
        return {"prompt": f"{family}, number {i}", "rate": self.rates[i] if i < len(self.rates) else NAN}


def v0_stack(rates: Any = None, group_size: int = 8, seed: int = 0, **params: Any) -> tuple[MethodStack, V0]:
    """With `rates` they are the predictions of prompts 0, 1, .."""
    if rates is not None:
        params = {"prior": "column", "prior_column": "rate", **params}
    method = V0(build_params(V0.Params, acting(V0.Params, params), "v0"))
    run = make_run(dataset=Table(rates), dataset_size=PROMPTS, group_size=group_size)
    return start_stack(method, seed=seed, run=run), method


def budgets(rates: Any, total: int, **params: Any) -> list[int]:
    """Rollouts per prompt out of a plan with this total, through the hook."""
    n, size = len(rates), total // len(rates)
    stack, method = v0_stack(rates, group_size=max(2, size), **params)
    rows = tuple(PlanRow(i, i, size + (i < total - size * n)) for i in range(n))
    plan = stack.call("plan", method, Plan(rows, size, total))
    return [row.n for row in plan.rows]


def value(budget: Any, rates: Any) -> float:
    return float(utility(np.array(budget), np.array(rates)).sum())


# ---- utility


@pytest.mark.parametrize(("b", "p"), itertools.product([1, 2, 3, 8, 32], [0.0, 0.02, 0.3, 0.5, 0.97, 1.0]))
def test_utility_is_the_expected_number_of_failures_beside_a_success(b: int, p: float) -> None:
    expected = sum(math.comb(b, k) * p**k * (1 - p) ** (b - k) * (b - k) for k in range(1, b + 1))
    assert float(utility(b, p)) == pytest.approx(expected, abs=1e-12)
    assert float(utility(b, p)) >= 0


def test_utility_values_of_the_specification() -> None:
    assert float(utility(8, 0.5)) == 3.96875 and float(utility(2, 0.5)) == 0.5
    assert utility(1, np.linspace(0, 1, 5)).tolist() == [0.0] * 5
    assert utility(64, np.array([0.0, 1.0])).tolist() == [0.0, 0.0]


# ---- budgets


@pytest.mark.parametrize(
    ("rates", "total", "high", "greedy", "greedy_value", "exact_value"),
    [
        ((0.02, 0.1, 0.2, 0.5, 0.8, 0.98), 48, 128, [2, 2, 34, 6, 2, 2], 30.67, 34.72),
        ((0.02, 0.1, 0.2, 0.5, 0.8, 0.98), 48, 16, [2, 10, 16, 16, 2, 2], 26.26, 29.17),
        ((0.69, 0.08, 0.68, 0.69), 24, 128, [5, 2, 12, 5], 7.06, None),
        ((0.4,) * 5, 23, 128, [7, 7, 5, 2, 2], None, None),
        ((0.1,) * 6, 48, 128, [38, 2, 2, 2, 2, 2], None, None),
    ],
)
def test_budgets_of_the_specification(
    rates: Any, total: int, high: int, greedy: list[int], greedy_value: Any, exact_value: Any
) -> None:
    assert budgets(rates, total, max_rollouts=high) == greedy
    if greedy_value:
        assert value(greedy, rates) == pytest.approx(greedy_value, abs=5e-3)
    best = budgets(rates, total, max_rollouts=high, allocation="exact")
    assert sum(best) == total and value(best, rates) >= value(greedy, rates) - 1e-12
    if exact_value:
        assert value(best, rates) == pytest.approx(exact_value, abs=5e-3)


def test_exact_budgets_of_the_specification() -> None:
    hard = (0.02, 0.1, 0.2, 0.5, 0.8, 0.98)
    assert budgets(hard, 48, allocation="exact") == [2, 38, 2, 2, 2, 2]
    assert budgets(hard, 48, max_rollouts=16, allocation="exact") == [2, 16, 16, 10, 2, 2]
    assert sorted(budgets((0.4,) * 5, 23, allocation="exact")) == [2, 5, 5, 5, 6]
    assert sorted(budgets((0.1,) * 6, 48, allocation="exact")) == [2] * 5 + [38]
    assert value([6] * 4, (0.69, 0.08, 0.68, 0.69)) == pytest.approx(7.50, abs=5e-3)  # equal budgets beat greedy


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_exact_is_the_best_of_all(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 4))
    rates = data.draw(st.lists(st.floats(0, 1), min_size=n, max_size=n))
    low = data.draw(st.lists(st.integers(2, 4), min_size=n, max_size=n))
    high = [lo + data.draw(st.integers(0, 6)) for lo in low]
    total = data.draw(st.integers(sum(low), sum(high) + 2))
    spent = min(total, sum(high))
    every = [b for b in itertools.product(*map(range, low, (h + 1 for h in high))) if sum(b) == spent]
    best = max(value(b, rates) for b in every)
    exact, greedy = (
        allocate_exact(np.array(rates), total, low, high),
        allocate_greedy(np.array(rates), total, low, high),
    )
    assert value(exact, rates) == pytest.approx(best, abs=1e-10)
    for found in (exact, greedy):
        assert int(found.sum()) == spent
        assert all(lo <= b <= h for lo, b, h in zip(low, found, high, strict=True))
    # the greedy rule, by hand
    by_hand = list(low)
    for _ in range(spent - sum(low)):
        gains = [
            value([b + 1], [r]) - value([b], [r]) if b < h else -math.inf
            for b, r, h in zip(by_hand, rates, high, strict=True)
        ]
        if max(gains) - sorted(gains)[-2 if n > 1 else -1] > 1e-12 or n == 1:
            by_hand[int(np.argmax(gains))] += 1
        else:
            return  # a tie, which rounding decides
    assert greedy.tolist() == by_hand


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_exact_beats_greedy_and_equal_budgets(data: st.DataObject) -> None:
    rates = data.draw(st.lists(st.floats(0, 1), min_size=2, max_size=12))
    size, high = data.draw(st.integers(2, 8)), data.draw(st.integers(8, 40))
    total, n = size * len(rates), len(rates)
    exact = allocate_exact(np.array(rates), total, [2] * n, [high] * n)
    greedy = allocate_greedy(np.array(rates), total, [2] * n, [high] * n)
    assert value(exact, rates) >= max(value(greedy, rates), value([size] * n, rates)) - 1e-9
    assert int(exact.sum()) == int(greedy.sum()) == total


def test_order_of_prompts_does_not_matter() -> None:
    rates, order = np.array([0.02, 0.13, 0.27, 0.55, 0.81]), [3, 0, 4, 2, 1]
    for allocate in (allocate_greedy, allocate_exact):
        one = allocate(rates, 40, [2] * 5, [128] * 5)
        assert allocate(rates[order], 40, [2] * 5, [128] * 5).tolist() == one[order].tolist()


def test_a_large_batch_is_allotted_exactly() -> None:
    rates = np.random.default_rng(0).beta(0.5, 0.8, 512)
    exact = allocate_exact(rates, 4096, [2] * 512, [32] * 512)
    greedy = allocate_greedy(rates, 4096, [2] * 512, [32] * 512)
    assert exact.sum() == greedy.sum() == 4096 and value(exact, rates) >= value(greedy, rates)


# ---- the plan


def test_uniform_and_unknown_are_the_plan_of_the_host() -> None:
    plan = make_plan(4, 8)
    for stack, method in (v0_stack([0.1, 0.5, 0.9, 0.2], allocation="uniform"), v0_stack(), v0_stack([NAN] * 4)):
        assert stack.call("plan", method, plan) is None


def test_a_prompt_without_a_prediction_keeps_its_share() -> None:
    assert budgets([0.05, NAN, 0.3, 0.9], 32)[1] == 8
    assert sum(budgets([0.05, NAN, 0.3, 0.9], 32)) == 32
    known = budgets([0.05, 0.3, 0.9], 24)
    assert [b for i, b in enumerate(budgets([0.05, NAN, 0.3, 0.9], 32)) if i != 1] == known


def test_constant_predictions_do_not_depend_on_the_prompts() -> None:
    constant = lambda prompts, context: [0.3] * len(prompts)
    one = [r.n for r in v0_plan(constant, [0, 1, 2, 3]).rows]
    two = [r.n for r in v0_plan(constant, [9, 4, 7, 12]).rows]
    assert one == two and sum(one) == 32


def v0_plan(prior: Any, prompts: list[int], **params: Any) -> Plan:
    stack, method = v0_stack(prior=prior, **params)
    return stack.call("plan", method, Plan(tuple(PlanRow(p, g, 8) for g, p in enumerate(prompts)), 8, 8 * len(prompts)))


def test_through_the_driver_groups_of_any_size_are_trained() -> None:
    stack, _ = v0_stack([0.1, 0.3, 0.6, 0.95], max_rollouts=16)
    plan = first_plan(stack, [0, 1, 2, 3], 8, 32, PROMPTS)
    sizes = [row.n for row in plan.rows]
    assert sum(sizes) == 32 and sizes != [8] * 4 and min(sizes) >= 2 and plan.budget == 0
    assert sizes == budgets([0.1, 0.3, 0.6, 0.95], 32, max_rollouts=16)
    group = np.repeat(range(4), sizes)
    rewards = (np.arange(32) % 3 == 0).astype(float)
    decision = one_step(stack, make_rollouts(rewards, group.tolist()))
    assert decision.stays.all() and decision.estimator == "rl_plugins"
    for g in range(4):
        own = rewards[group == g]
        wanted = (own - own.mean()) / (own.std(ddof=1) + 1e-4)
        assert decision.row_advantages[torch.from_numpy(group == g)].tolist() == pytest.approx(wanted.tolist())
    logged = combine([stack.metrics.take()])
    assert logged["v0/most"] == max(sizes)
    rates = [0.1, 0.3, 0.6, 0.95]
    assert logged["v0/utility"] == pytest.approx(value(sizes, rates) / value([8] * 4, rates))


def test_rows_keep_what_other_methods_asked_for() -> None:
    stack, method = v0_stack([0.3, 0.999, 0.3])
    given = (Completion((1,)), Completion((2,)), Completion((3,)), Completion((4,)))
    rows = (
        PlanRow(0, 0, 8, edit={"prompt": "x"}, payload="p"),
        PlanRow(1, 1, 8, spare=1, given=given),
        PlanRow(2, 2, 0, spare=2),
    )
    planned = stack.call("plan", method, Plan(rows, 8, 16)).rows
    assert planned[0] == rows[0].replace(n=13)
    assert planned[1] == rows[1].replace(n=3)  # room for four given ones
    assert planned[2] == rows[2]


def test_a_plan_too_small_is_refused() -> None:
    stack, method = v0_stack([0.3] * 4, min_rollouts=4)
    with pytest.raises(MethodError, match="8 rollouts for 4 prompts are fewer than `min_rollouts` = 4 each"):
        stack.call("plan", method, make_plan(4, 2))


# ---- predictions


def test_nearest_learns_from_one_batch_and_plans_the_next() -> None:
    """Odd prompts fail, even ones succeed; new prompts of both families are told apart."""
    stack, method = v0_stack(max_rollouts=30, allocation="exact", prior_neighbors=2)
    assert stack.call("plan", method, make_plan(4, 8)) is None
    rewards = [1.0, 1, 1, 0] * 2 + [0.0, 0, 0, 1] * 2
    one_step(stack, make_rollouts(rewards, prompt_index=[0] * 4 + [2] * 4 + [1] * 4 + [3] * 4))
    rate = method.prior.predict(method.state, torch.tensor([6, 7])).tolist()
    assert rate[0] > 0.6 and rate[1] < 0.4
    plan = stack.call("plan", method, Plan((PlanRow(6, 0, 8), PlanRow(7, 1, 8)), 8, 16))
    assert plan.rows[0].n < plan.rows[1].n and plan.trained == 16
    stack.metrics.take()
    one_step(stack, make_rollouts([1.0, 1, 1, 0, 0, 0, 0, 0], prompt_index=[6] * 4 + [7] * 4))
    logged = combine([stack.metrics.take()])
    # ranks: three successes and a failure of prompt 6 above four failures of prompt 7
    assert logged["v0/auc"] == pytest.approx((3 * 4 + 3 * 0.5) / (3 * 5))
    assert logged["v0/predicted"] == pytest.approx(sum(rate) / 2)
    brier = (3 * (1 - rate[0]) ** 2 + rate[0] ** 2 + 4 * rate[1] ** 2) / 8
    assert logged["v0/brier"] == pytest.approx(brier) and logged["v0/mixed"] == 0.5


def test_outcomes_are_successes_once_per_rollout_without_those_unscored() -> None:
    stack, method = v0_stack(prior="running_mean", prior_decay=1.0, success_threshold=0.3)
    rollout, index = torch.tensor([0, 0, 1, 2, 3]), torch.tensor([0, 1, 0, 0, 0])
    rewards = [0.3, 0.3, 0.29, NAN, 7.0]
    one_step(stack, make_rollouts(rewards, [0] * 5, rollout=rollout, index=index, prompt_index=[4] * 5))
    assert float(method.state["total"][4]) == 2.0 and float(method.state["weight"][4]) == 3.0


@pytest.mark.parametrize("prior", ["nearest", "running_mean", "beta"])
def test_state_survives(prior: str, tmp_path: Path) -> None:
    def batch(stack: MethodStack, step: int) -> list[int]:
        plan = first_plan(stack, [step, step + 1, step + 2], 8, 24, PROMPTS)
        group = np.repeat(range(3), [row.n for row in plan.rows])
        rewards = np.random.default_rng(step).random(24) < 0.2 + 0.3 * group
        index = [plan.rows[g].prompt_index for g in group]
        one_step(stack, make_rollouts(rewards.astype(float), group.tolist(), prompt_index=index))
        return [row.n for row in plan.rows]

    stack, _ = v0_stack(prior=prior, context_size=40)
    for step in range(3):
        batch(stack, step)
    save_state(tmp_path, stack.state_dict("d"))
    other, _ = v0_stack(prior=prior, context_size=40)
    other.load_state_dict(load_state(tmp_path), "d")
    later = [batch(stack, step) for step in range(1, 4)]
    assert later == [batch(other, step) for step in range(1, 4)]
    assert any(sizes != [8, 8, 8] for sizes in later)


def test_predictions_outside_of_zero_to_one_are_refused() -> None:
    stack, method = v0_stack([0.5, 1.5])
    with pytest.raises(MethodError, match=r"success rate is 1\.5; it must be in \[0, 1\]"):
        stack.call("plan", method, make_plan(2, 8))
    stack, method = v0_stack(prior=lambda prompts, context: [-0.1] * len(prompts))
    method.prior._service.backoff = 0.0
    with pytest.raises(MethodError, match=r"-0\.1 is not a finite number in \[0, 1\]"):
        stack.call("plan", method, make_plan(2, 8))


def test_auc() -> None:
    score, success = torch.tensor([0.1, 0.4, 0.4, 0.9]).double(), torch.tensor([0.0, 1.0, 0.0, 1.0]).double()
    assert auc(score, success) == pytest.approx(3.5 / 4)
    assert math.isnan(auc(score, torch.ones(4)))
    assert auc(torch.ones(4).double(), success) == 0.5


# ---- the value model's loss, which the package does not train


def value_model_loss(
    logits: torch.Tensor, soft_labels: torch.Tensor, alpha: float = 0.25, context_counts: tuple[int, int] | None = None
) -> torch.Tensor:
    """Loss that the paper's value model is trained with, on queries of one context.

        alpha mean(-log sigmoid(s_positive - s_negative)) + (1 - alpha) mean(c (-y log p_1 - (1 - y) log p_0))

    Args:
        logits: (queries, 2) of failure and success; s is their difference. Even rows are positive queries, odd ones
            negative; rows 2k and 2k + 1 are a pair.
        soft_labels: (queries,) y in [0, 1].
        alpha: weight of the ranking, which the shortcut "predict the context's mean" does not lower.
        context_counts: positive and negative rows of the context, to balance the classes: c is
            total / (2 positives) for positive queries and total / (2 negatives) for negative ones. None: c = 1.

    Raises:
        ValueError: shapes that do not fit.
    """
    if logits.ndim != 2 or logits.shape[1] != 2 or len(logits) % 2 or soft_labels.shape != logits.shape[:1]:
        raise ValueError(
            f"logits are {tuple(logits.shape)} and labels {tuple(soft_labels.shape)}; they must be (queries, 2) and "
            f"(queries,), with as many positive as negative queries."
        )
    score = logits[:, 1] - logits[:, 0]
    ranking = -torch.nn.functional.logsigmoid(score[0::2] - score[1::2]).mean()
    log_p = torch.log_softmax(logits, dim=1)
    entropy = -(soft_labels * log_p[:, 1] + (1 - soft_labels) * log_p[:, 0])
    if context_counts is not None:
        weight = sum(context_counts) / (2 * torch.tensor(context_counts, dtype=entropy.dtype, device=entropy.device))
        entropy = entropy * weight.repeat(len(entropy) // 2)
    return alpha * ranking + (1 - alpha) * entropy.mean()


@GOLDEN.kind("logits")
def check_loss(case: Case) -> None:
    inputs, p, expected = case.inputs, case.params, case.expected
    inputs.must_be("row_order", "positive,negative alternating")
    logits = torch.tensor(inputs["logits"], dtype=torch.float64)
    labels = torch.tensor(inputs["soft_labels"], dtype=torch.float64)
    counts = inputs["context_counts"]["n_pos"], inputs["context_counts"]["n_neg"]
    loss = lambda alpha: float(value_model_loss(logits, labels, alpha, counts if p["loss_balance"] else None))
    assert loss(p["alpha"]) == pytest.approx(expected["total"], abs=2e-7)
    assert loss(1.0) == pytest.approx(expected["pairwise"], abs=2e-7)
    assert loss(0.0) == pytest.approx(expected["ce"], abs=2e-7)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


def test_ranking_does_not_see_a_constant_and_classes_are_balanced() -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 2, generator=generator, dtype=torch.float64)
    labels = torch.rand(6, generator=generator, dtype=torch.float64)
    moved = logits + torch.tensor([0.0, 3.0])
    assert float(value_model_loss(moved, labels, 1.0)) == pytest.approx(float(value_model_loss(logits, labels, 1.0)))
    assert float(value_model_loss(moved, labels, 0.0)) != pytest.approx(float(value_model_loss(logits, labels, 0.0)))
    each = [-y * lp[1] - (1 - y) * lp[0] for y, lp in zip(labels, logits.log_softmax(1), strict=True)]
    weight = [40 / 20, 40 / 60] * 3
    wanted = sum(float(w * e) for w, e in zip(weight, each, strict=True)) / 6
    assert float(value_model_loss(logits, labels, 0.0, (10, 30))) == pytest.approx(wanted)
    for bad in (logits[:5], logits[:, :1], logits[:4]):
        with pytest.raises(ValueError, match=r"must be \(queries, 2\)"):
            value_model_loss(bad, labels[:5] if len(bad) == 5 else labels)


# ---- parameters


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"min_rollouts": 1}, "`min_rollouts` is 1"),
        ({"min_rollouts": 8, "max_rollouts": 4}, "`max_rollouts` is 4, below `min_rollouts` = 8"),
        ({"prior": "constant"}, "`prior` is 'constant'"),
        ({"prior_value": 0.5}, "no parameter `prior_value`"),
        ({"allocation": "uniform", "max_rollouts": 9}, "`max_rollouts` has no effect"),
        ({"allocation": "dp"}, "`allocation` is 'dp'"),
        ({"context_size": 0}, "`context_size` is 0"),
    ],
)
def test_parameters_that_cannot_be(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_params(V0.Params, params, "v0")
    assert text in str(caught.value)


def test_group_size_must_lie_between_the_limits() -> None:
    for params in ({"min_rollouts": 9}, {"max_rollouts": 7}):
        with pytest.raises(ConfigError, match="the group size is 8"):
            v0_stack(**params)
