"""VADE (arXiv 2511.18902): the posterior, the choice of prompts, and both through the driver."""

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
from one_method import acting

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Plan, PromptPool, Rollouts
from rl_plugins.methods.vade import Vade
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

GOLDEN = Golden("vade")


def vade_stack(size: int = 16, seed: int = 0, **params: Any) -> tuple[MethodStack, Vade]:
    method = Vade(build_params(Vade.Params, acting(Vade.Params, params), "vade"))
    return start_stack(method, seed=seed, run=make_run(dataset_size=size)), method


def set_counts(method: Vade, alpha: Any, beta: Any) -> None:
    method.state = {
        "alpha": torch.as_tensor(alpha, dtype=torch.float64),
        "beta": torch.as_tensor(beta, dtype=torch.float64),
    }


def choose(stack: MethodStack, size: int, n: int, taken: tuple[int, ...] = (), step: int = 0) -> list[int]:
    stack.batch = step
    return list(stack.one("select_prompts", PromptPool(size, tuple(range(n)), taken, None, step), n))


def observe(stack: MethodStack, rollouts: Rollouts) -> dict[str, float]:
    """Counts these rollouts and returns what was logged."""
    one_step(stack, rollouts)
    return combine([stack.metrics.take()])


# ---- the posterior


@GOLDEN.kind("num_correct")
def check_posterior(case: Case) -> None:
    given_, size = case.inputs, case.params["G"]
    method = Vade(case.build(Vade, {"lambda1": "selected_decay", "lambda2": "unselected_decay"}))
    stack = start_stack(method, run=make_run(dataset_size=2))
    set_counts(method, [given_["alpha"], 0.0], [given_["beta"], 0.0])
    rewards = [1.0] * given_["num_correct"] + [0.0] * (size - given_["num_correct"])
    prompt = 0 if given_["selected"] else 1
    observe(stack, make_rollouts(rewards, group_size=size, prompt_index=[prompt] * size))
    assert float(method.state["alpha"][0]) == pytest.approx(case.expected["alpha"], abs=1e-12)
    assert float(method.state["beta"][0]) == pytest.approx(case.expected["beta"], abs=1e-12)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


def test_second_example_of_the_figure() -> None:
    stack, method = vade_stack(1)
    set_counts(method, [2.7], [5.3])
    observe(stack, make_rollouts([1.0] * 4 + [0.0] * 4, group_size=8))
    assert method.state["alpha"].tolist() == pytest.approx([4.54])
    assert method.state["beta"].tolist() == pytest.approx([5.06])


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_loop(data: st.DataObject) -> None:
    size, rows = data.draw(st.integers(1, 6)), data.draw(st.integers(1, 24))
    count = st.lists(st.floats(0, 30), min_size=size, max_size=size)
    alpha, beta = data.draw(count), data.draw(count)
    reward_of = st.one_of(st.just(math.nan), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-2, 2))
    rewards = data.draw(st.lists(reward_of, min_size=rows, max_size=rows))
    prompts = data.draw(st.lists(st.integers(-1, size - 1), min_size=rows, max_size=rows))
    groups = data.draw(st.lists(st.integers(0, 5), min_size=rows, max_size=rows))
    success = data.draw(st.sampled_from(["threshold", "clipped_sum"]))
    threshold = data.draw(st.sampled_from([0.0, 0.5, 1.0]))
    low, high = sorted((data.draw(st.floats(0, 1)), data.draw(st.floats(0.01, 1))))

    stack, method = vade_stack(
        size, selected_decay=low, unselected_decay=high, success=success, success_threshold=threshold
    )
    set_counts(method, alpha, beta)
    logged = observe(stack, make_rollouts(rewards, group=groups, prompt_index=prompts))
    if all(math.isnan(r) for r in rewards):  # a batch without a reward is skipped
        low = high = 1.0

    mixed = []
    for i in range(size):
        good = [
            (float(r >= threshold) if success == "threshold" else min(max(r, 0.0), 1.0))
            for r, p in zip(rewards, prompts, strict=True)
            if p == i and not math.isnan(r)
        ]
        decay = low if good else high
        assert float(method.state["alpha"][i]) == pytest.approx(decay * alpha[i] + math.fsum(good), abs=1e-12)
        failed = math.fsum(1 - g for g in good)
        assert float(method.state["beta"][i]) == pytest.approx(decay * beta[i] + failed, abs=1e-12)
        mixed += [max(good) > min(good)] if good else []
    assert bool((method.state["alpha"] >= 0).all()) and bool((method.state["beta"] >= 0).all())
    if mixed:
        assert logged["vade/informative"] == pytest.approx(sum(mixed) / len(mixed))
    else:
        assert "vade/informative" not in logged


def test_a_visit_adds_exactly_the_scored_rollouts_and_others_keep_their_mean() -> None:
    stack, method = vade_stack(3, selected_decay=0.5)
    set_counts(method, [2.0, 6.0, 3.0], [4.0, 2.0, 0.0])
    observe(stack, make_rollouts([1.0, 0.0, 0.0, math.nan], prompt_index=[0] * 4))
    alpha, beta = method.state["alpha"], method.state["beta"]
    assert alpha.tolist() == pytest.approx([0.5 * 2 + 1, 0.999 * 6, 0.999 * 3])
    assert beta.tolist() == pytest.approx([0.5 * 4 + 2, 0.999 * 2, 0.0])
    assert float(alpha[1] / beta[1]) == pytest.approx(3.0, rel=1e-15)


def test_no_decay_counts_everything_and_full_decay_keeps_the_last_visit() -> None:
    batches = [[1.0, 0.0, 0.0, 0.0], [1.0, 1.0, 1.0, 0.0], [0.0, 0.0, 1.0, 1.0]]
    for params, wanted in (
        ({"selected_decay": 1.0, "unselected_decay": 1.0}, (6.0, 6.0)),
        ({"selected_decay": 0.0, "unselected_decay": 1.0}, (2.0, 2.0)),
    ):
        stack, method = vade_stack(2, **params)
        for rewards in batches:
            observe(stack, make_rollouts(rewards, prompt_index=[1] * 4))
        assert (float(method.state["alpha"][1]), float(method.state["beta"][1])) == wanted
        assert float(method.state["alpha"][0] + method.state["beta"][0]) == 0.0


def test_evidence_of_a_prompt_in_every_batch_has_its_limit() -> None:
    stack, method = vade_stack(2)
    for _ in range(40):
        logged = observe(stack, make_rollouts([1.0] * 2 + [0.0] * 6, group_size=8, prompt_index=[0] * 8))
    assert float(method.state["alpha"][0]) == pytest.approx(2 / 0.8)
    assert float(method.state["beta"][0]) == pytest.approx(6 / 0.8)
    assert logged["vade/evidence"] == pytest.approx(8 / 0.8)
    assert logged["vade/seen"] == 0.5
    assert logged["vade/posterior_mean"] == pytest.approx(((2.5 + 1) / 12 + 0.5) / 2)


def test_rows_without_a_reward_and_foreign_prompts() -> None:
    stack, method = vade_stack(4)
    set_counts(method, [1.0] * 4, [1.0] * 4)
    nan = math.nan
    rewards = [nan, nan, 1.0, nan, 1.0, 0.0]
    observe(stack, make_rollouts(rewards, group=[0, 0, 1, 1, 2, 2], prompt_index=[0, 0, 1, 1, -1, -1]))
    assert method.state["alpha"].tolist() == pytest.approx([0.999, 0.2 + 1, 0.999, 0.999])
    assert method.state["beta"].tolist() == pytest.approx([0.999, 0.2, 0.999, 0.999])
    logged = observe(stack, make_rollouts([1.0, 0.0], group_size=2, prompt_index=[-1, -1]))
    assert method.state["alpha"].tolist() == pytest.approx([0.999**2, 0.999 * 1.2, 0.999**2, 0.999**2])
    assert "vade/informative" not in logged


def test_rows_are_collected_by_prompt_and_their_order_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    rewards = (torch.rand(24, generator=generator) < 0.5).double()
    group = torch.arange(24) % 6
    prompt = group % 3  # two groups per prompt
    results = []
    for order in (torch.arange(24), torch.randperm(24, generator=generator)):
        stack, method = vade_stack(4)
        observe(stack, make_rollouts(rewards[order], group=group[order].tolist(), prompt_index=prompt[order].tolist()))
        results.append(method.state)
    for i in range(3):
        assert float(results[0]["alpha"][i]) == float(rewards[prompt == i].sum())
    assert torch.equal(results[0]["alpha"], results[1]["alpha"])
    assert torch.equal(results[0]["beta"], results[1]["beta"])


def test_a_rollout_of_several_rows_counts_once() -> None:
    stack, method = vade_stack(2)
    rollouts = make_rollouts(
        [1.0, 1.0, 0.0, 1.0, 0.0, math.nan],
        group=[0] * 6,
        prompt_index=[0] * 6,
        rollout=torch.tensor([0, 0, 0, 1, 2, 2]),
        index=torch.tensor([0, 1, 2, 0, 0, 1]),
    )
    observe(stack, rollouts)
    assert float(method.state["alpha"][0]) == pytest.approx(2 / 3 + 1)
    assert float(method.state["beta"][0]) == pytest.approx(1 / 3 + 1)


def test_graded_rewards() -> None:
    for success, threshold, wanted in (
        ("clipped_sum", 0.5, (1.75, 2.25)),
        ("threshold", 0.5, (2.0, 2.0)),
        ("threshold", 0.6, (1.0, 3.0)),
        ("threshold", -2, (4.0, 0.0)),
    ):
        stack, method = vade_stack(1, success=success, success_threshold=threshold)
        observe(stack, make_rollouts([-1.0, 0.25, 0.5, 3.0]))
        assert (float(method.state["alpha"][0]), float(method.state["beta"][0])) == wanted


def test_equal_graded_rewards_are_not_informative() -> None:
    stack, _ = vade_stack(2, success="clipped_sum")
    logged = observe(stack, make_rollouts([0.5, 0.5, 0.25, 0.75], group_size=2))
    assert logged["vade/informative"] == 0.5


# ---- the choice


def test_choice_is_the_top_of_the_draw() -> None:
    generator = np.random.default_rng(3)
    alpha, beta = generator.uniform(0, 9, 50), generator.uniform(0, 9, 50)
    for score in ("p(1-p)^2", "p(1-p)"):
        stack, method = vade_stack(50, seed=5, score=score)
        set_counts(method, alpha, beta)
        p = stack.rng("vade", "prompts").beta(alpha + 1, beta + 1)
        information = [x * (1 - x) ** (2 if score == "p(1-p)^2" else 1) for x in p]
        wanted = sorted(range(50), key=lambda i: -information[i])[:7]
        assert choose(stack, 50, 7) == wanted


def test_score_peaks_where_the_paper_says() -> None:
    """With sharp posteriors the draw is the rate itself: 1/3 wins under p(1-p)^2, 1/2 under p(1-p)."""
    rates = np.array([0.1, 1 / 3, 0.5, 0.7, 0.9])
    for score, best in (("p(1-p)^2", 1), ("p(1-p)", 2)):
        stack, method = vade_stack(5, score=score)
        set_counts(method, 1e7 * rates, 1e7 * (1 - rates))
        assert choose(stack, 5, 1) == [best]


def test_unique_same_seed_same_choice_and_all_of_them() -> None:
    first, second, other = (vade_stack(40, seed=s)[0] for s in (1, 1, 2))
    a = choose(first, 40, 12)
    assert len(set(a)) == 12
    assert choose(second, 40, 12) == a
    assert choose(other, 40, 12) != a
    assert choose(first, 40, 12, step=1) != a
    assert sorted(choose(first, 40, 40)) == list(range(40))


def test_a_second_call_continues_the_same_ranking() -> None:
    stack, _ = vade_stack(30)
    all_at_once = choose(stack, 30, 12)
    assert choose(stack, 30, 5) == all_at_once[:5]
    assert choose(stack, 30, 7, taken=tuple(all_at_once[:5])) == all_at_once[5:]


def test_taken_prompts_are_never_chosen_and_a_foreign_one_takes_no_place() -> None:
    stack, method = vade_stack(6)
    set_counts(method, [1.0, 1.0, 0, 0, 0, 1e6], [2.0, 2.0, 1e6, 1e6, 1e6, 2e6])
    assert 5 in choose(stack, 6, 3)
    assert 5 in choose(stack, 6, 3, taken=(-1,))
    assert sorted(choose(stack, 6, 4, taken=(-1, 5, 0))) == [1, 2, 3, 4]


def test_without_evidence_all_prompts_are_alike() -> None:
    stack, _ = vade_stack(20)
    count = np.zeros(20)
    for step in range(2000):
        count[choose(stack, 20, 5, step=step)] += 1
    # binomial(2000, 1/4): standard deviation 19.4
    assert np.abs(count - 500).max() < 5 * 19.4


def test_mixed_prompts_are_chosen_far_more_than_settled_ones() -> None:
    stack, method = vade_stack(3)
    set_counts(method, [100.0, 0.0, 33.0], [0.0, 100.0, 67.0])
    first = [choose(stack, 3, 1, step=s)[0] for s in range(500)]
    assert first.count(2) == 500
    # and an unseen prompt is tried before a settled one
    set_counts(method, [100.0, 0.0, 0.0], [0.0, 100.0, 0.0])
    first = [choose(stack, 3, 1, step=s)[0] for s in range(500)]
    assert first.count(2) > 400


def test_global_generators_are_not_touched() -> None:
    stack, _ = vade_stack(10)
    torch.manual_seed(0)
    np.random.seed(0)
    wanted = (torch.rand(3), np.random.rand(3))
    torch.manual_seed(0)
    np.random.seed(0)
    choose(stack, 10, 4)
    observe(stack, make_rollouts([1.0, 0.0, 0.0, 0.0]))
    assert torch.equal(torch.rand(3), wanted[0]) and np.array_equal(np.random.rand(3), wanted[1])


def test_a_large_dataset_is_not_gone_through() -> None:
    """Above 65,536 prompts counts are scaled and not every rate is drawn; the rule stays."""
    size = 100_000
    stack, method = vade_stack(size)
    generator = np.random.default_rng(0)
    alpha, beta = generator.uniform(0, 9, (2, size))
    set_counts(method, alpha, beta)
    observe(stack, make_rollouts([1.0, 0.0, 0.0, 1.0], prompt_index=[3] * 4))
    assert float(method.state["alpha"][7]) == alpha[7] and set(method.state["scales"]) == {0.999}, (
        "others are not written"
    )
    chosen = choose(stack, size, 64)
    assert len(set(chosen)) == 64
    mean = (alpha[chosen] + 1) / (alpha[chosen] + beta[chosen] + 2)
    assert abs(mean.mean() - 0.35) < 0.1 and mean.std() < 0.15, "prompts of a rate near 1/3; all have 0.5 and 0.18"
    assert choose(stack, size, 24, taken=tuple(chosen[:40])) == chosen[40:]
    again = vade_stack(size)
    set_counts(again[1], alpha, beta)
    observe(again[0], make_rollouts([1.0, 0.0, 0.0, 1.0], prompt_index=[3] * 4))
    assert choose(again[0], size, 64) == chosen


# ---- through the driver


class HalfPlans(Method):
    """Trains two of four rollouts of each prompt, so a batch must be filled with further prompts."""

    name = "half"

    def plan(self, plan: Plan) -> Plan:
        return plan.replace(rows=tuple(r.replace(n=2) for r in plan.rows))


class DropsFailures(Method):
    name = "drops"

    def select(self, rollouts: Rollouts) -> torch.Tensor:
        return rollouts.reward > 0.5


def train(stack: MethodStack, rate: np.ndarray, steps: int, prompts: int = 4, group: int = 8) -> list[list[int]]:
    """`steps` generation batches on Bernoulli prompts; returns the prompts of each."""
    history = []
    for _ in range(steps):
        plan = first_plan(stack, list(range(prompts)), group, prompts * group, len(rate))
        index = np.repeat([r.prompt_index for r in plan.rows], [r.n for r in plan.rows])
        outcome = np.random.default_rng([7, stack.batch]).random(len(index)) < rate[index]
        number = np.repeat([r.group for r in plan.rows], [r.n for r in plan.rows])
        one_step(stack, make_rollouts(outcome.astype(float), group=number.tolist(), prompt_index=index.tolist()))
        history.append([r.prompt_index for r in plan.rows])
    return history


def test_driver_takes_the_chosen_prompts_and_counts_them() -> None:
    stack, method = vade_stack(12)
    (chosen,) = train(stack, np.full(12, 0.5), 1)
    assert len(set(chosen)) == 4
    evidence = method.state["alpha"] + method.state["beta"]
    assert sorted(evidence.nonzero()[:, 0].tolist()) == sorted(chosen)
    assert evidence[chosen].tolist() == [8.0] * 4
    assert set(combine([stack.metrics.take()])) == {
        "vade/informative",
        "vade/posterior_mean",
        "vade/seen",
        "vade/evidence",
    }


def test_a_batch_that_is_not_full_gets_the_next_of_the_ranking() -> None:
    stack = start_stack(Vade(), HalfPlans(), run=make_run(dataset_size=20))
    plan = first_plan(stack, [0, 1, 2], 4, 12, 20)
    chosen = [r.prompt_index for r in plan.rows]
    assert [r.n for r in plan.rows] == [2] * 6
    assert chosen == choose(vade_stack(20)[0], 20, 6)


def test_rows_that_left_are_counted() -> None:
    stack = start_stack(Vade(), DropsFailures(), run=make_run(dataset_size=2))
    decision = one_step(stack, make_rollouts([1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, math.nan]))
    assert decision.trained.tolist() == [True, False, False, False, True, True, False, False]
    state = stack.methods[0].state
    assert state["alpha"].tolist() == [1.0, 2.0]
    assert state["beta"].tolist() == [3.0, 1.0]


def test_choices_leave_the_settled_prompts() -> None:
    rate = np.array([0.0] * 20 + [1.0] * 20 + [0.35] * 8)
    stack, _ = vade_stack(48)
    history = train(stack, rate, 60)
    late = [p for batch in history[20:] for p in batch]
    assert np.mean([p >= 40 for p in late]) > 0.6  # uniform: 1/6


def test_a_prompt_whose_rate_jumps_is_chosen_again() -> None:
    rate = np.array([0.35] * 12 + [0.0] * 4)
    stack, _ = vade_stack(16, unselected_decay=0.98)
    before = [b for batch in train(stack, rate, 60)[20:] for b in batch]
    rate[12:] = 0.35
    after = [b for batch in train(stack, rate, 80)[40:] for b in batch]
    share_before, share_after = (np.mean([p >= 12 for p in x]) for x in (before, after))
    assert share_before < 0.1
    assert share_after > 0.2  # a quarter of the prompts


# ---- state


def test_state_survives_a_file_bit_by_bit_and_continues_alike(tmp_path: Path) -> None:
    rate = np.linspace(0, 1, 24)
    whole, _ = vade_stack(24)
    history = train(whole, rate, 12)

    first, method = vade_stack(24)
    train(first, rate, 5)
    save_state(tmp_path, first.state_dict("data"))
    second, resumed = vade_stack(24)
    saved = load_state(tmp_path)
    assert saved is not None
    second.load_state_dict(saved, "data")
    for name in ("alpha", "beta"):
        assert resumed.state[name].dtype == torch.float64
        assert torch.equal(resumed.state[name], method.state[name])
    assert train(second, rate, 7) == history[5:]
    assert torch.equal(second.methods[0].state["alpha"], whole.methods[0].state["alpha"])


# ---- parameters


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"selected_decay": -0.1}, "`selected_decay`"),
        ({"selected_decay": 1.1}, "`selected_decay`"),
        ({"unselected_decay": 0.0}, "`unselected_decay`"),
        ({"unselected_decay": 1.01}, "`unselected_decay`"),
        ({"selected_decay": 0.9, "unselected_decay": 0.5}, "`unselected_decay` is 0.5, below `selected_decay` = 0.9"),
        ({"score": "p(1-p)^3"}, "`score`"),
        ({"success": "sum"}, "`success`"),
        ({"success_threshold": "inf"}, "`success_threshold`"),
    ],
)
def test_parameters_out_of_range(params: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"Method `vade`: parameter {message}".replace("(", r"\(")):
        build_stack("vade", {"vade": params})
