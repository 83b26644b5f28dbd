"""MSSR (arXiv 2512.18215): counts, baseline, shaping and sampler against the authors' numbers, loops and the driver."""

from __future__ import annotations

import logging
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
from rl_plugins.core.method import Bundle, Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Completion, PlanRow, PromptPool, Rollouts
from rl_plugins.methods.mssr.tracker import TrackerParams, forgetting_rate
from rl_plugins.methods.mssr_baseline import MssrBaseline
from rl_plugins.methods.mssr_prompts import MssrPrompts, weighted_draw
from rl_plugins.methods.mssr_shaping import MssrShaping
from rl_plugins.runtime import registry
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.decide import Decision
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_plan, make_rollouts, make_run, make_tokens, one_step, start_stack

GOLDEN = Golden("mssr")
NAN = math.nan


class Table:
    """A dataset with one column."""

    column_names = ("v0",)

    def __init__(self, values: list[float]) -> None:
        self.values = values

    def __getitem__(self, i: int) -> dict[str, float]:
        return {"v0": self.values[i]}


def baseline_stack(size: int = 8, *others: Method, dataset: Any = None, **params: Any) -> MethodStack:
    method = MssrBaseline(build_params(MssrBaseline.Params, params, "mssr_baseline"))
    return start_stack(method, *others, run=make_run(dataset_size=size, dataset=dataset))


def shaping(**params: Any) -> MssrShaping:
    return MssrShaping(build_params(MssrShaping.Params, acting(MssrShaping.Params, params), "mssr_shaping"))


def batch(rewards: Any, prompts: Any, **options: Any) -> Rollouts:
    """One rollout per group; a prompt may have several groups."""
    return make_rollouts(rewards, range(len(prompts)), prompt_index=prompts, **options)


def counts(stack: MethodStack) -> tuple[list[float], list[float]]:
    return stack.methods[0].state["alpha"].tolist(), stack.methods[0].state["beta"].tolist()


# ---- the authors' numbers


def solve_kl(kl: float) -> float:
    """d > 0 with exp(d) - d - 1 = kl."""
    low, high = 0.0, 10.0
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if math.exp(middle) - middle - 1 < kl else (low, middle)
    return low


NAMES = {"v_init": "initial_value", "entropy_alpha": "entropy_weight", "entropy_kappa": "cap"}


def golden_stack(case: Case, values: list[float]) -> MethodStack:
    """The baseline on prompts with these first values, and the shaping if the case has it."""
    methods: list[Method] = [MssrBaseline(case.build(MssrBaseline, NAMES, value_column="v0"))]
    if "entropy_alpha" in case.params or "entropy_weight" in case.params:
        methods.append(MssrShaping(case.build(MssrShaping, NAMES)))
    return start_stack(*methods, run=make_run(dataset_size=len(values), dataset=Table(values)))


@GOLDEN.kind("steps")
def check_trajectory(case: Case) -> None:
    case.params.must_be("eps", 1e-6)  # least variance
    init, steps = case.inputs["init"], case.inputs["steps"]
    first = [NAN] * (1 + max([*init["ids"], *(i for step in steps for i in step["sample_ids"])]))
    for i, outcomes in zip(init["ids"], init["outcomes"], strict=True):
        first[i] = sum(outcomes) / len(outcomes)
    stack = golden_stack(case, first)
    method = stack.methods[0]
    p = method.params
    for step, expected in zip(steps, case.expected["steps"], strict=True):
        lengths, kl = step["response_lengths"], step["mean_token_kl_all_rows"]
        window = method.state["kl"]
        if kl is None:  # a KL that leaves rho as it is; before the first one it is the middle of its range
            method.state["kl"] = []
            measured = sum(window) / len(window) if window else p.target_kl / 2
            assert forgetting_rate(window, p) == pytest.approx(expected["rho_used"])
        else:
            measured = kl
        rollouts = batch(step["rewards"], step["sample_ids"], lengths=lengths)
        inside = torch.arange(step["T"]) < torch.tensor(lengths)[:, None]
        old = torch.tensor(step["old_log_probs"], dtype=torch.float64)[inside]
        tokens = make_tokens(rollouts, old_logprobs=old, ref_logprobs=old + solve_kl(measured))
        assert method._values(rollouts.prompt_index).tolist() == pytest.approx(expected["baseline_before"], rel=2e-7)
        decision = one_step(stack, rollouts, tokens)
        advantages = torch.zeros(inside.shape, dtype=torch.float64).masked_scatter(inside, decision.advantages)
        wanted = torch.tensor(expected["advantages"], dtype=torch.float64)
        torch.testing.assert_close(advantages, wanted, rtol=1e-5, atol=1e-6)  # theirs is float32
        logged = combine([stack.metrics.take()])
        assert logged["mssr_baseline/rho"] == pytest.approx(expected["rho_used"], rel=1e-8)
        for name in ("alpha", "beta"):
            for i in expected[name]:
                assert float(method.state[name][int(i)]) == pytest.approx(expected[name][i], rel=1e-8)
        ids = torch.tensor(sorted(int(i) for i in expected["alpha"]))
        assert method._values(ids).tolist() == pytest.approx(expected["value_after"], rel=2e-7)  # float32
        if kl is None:
            method.state["kl"] = window


@GOLDEN.kind("stored_log_probs")
def check_rate_per_sample(case: Case) -> None:
    """The method does not offer this rate, for the reason it names; these numbers say what is left out."""
    left_out = "forgetting rate per sample, from the log-probs of the prompt's last response"
    assert any(left_out in text for text in card_file(MssrBaseline).disagreements)
    stored, new, mask = (torch.tensor(case.inputs[k]) for k in ("stored_log_probs", "new_log_probs", "mask"))
    p = case.params
    rate = 2 ** (-((stored - new) * mask).sum(1) / p["d_half"])
    rho = case.expected["rho"]
    assert rate.clamp(p["rho_min"], p["rho_max"]).tolist() == pytest.approx([rho[i] for i in rho], rel=1e-6)


@GOLDEN.kind("log_probs")
def check_entropy_of_the_sampled_token(case: Case) -> None:
    logprobs = torch.tensor(case.inputs["log_probs"], dtype=torch.float64)
    rows, time = logprobs.shape
    rollouts = make_rollouts([1.0] * rows, lengths=[time] * rows)
    tokens = make_tokens(rollouts, old_logprobs=logprobs.flatten(), advantages=torch.full((rows,), 100.0))
    shaped = MssrShaping(case.build(MssrShaping, NAMES, entropy_weight=1.0)).shape(rollouts, tokens)
    entropy = (shaped.advantages - 100).view(rows, time).tolist()
    assert entropy == [pytest.approx(row, rel=1e-6) for row in case.expected["entropy"]]


@GOLDEN.kind("reward")
def check_batch_of_one(case: Case) -> None:
    (outcomes,) = case.inputs["init"]
    (wanted,) = case.expected["advantages"]
    stack = golden_stack(case, [sum(outcomes) / len(outcomes)])
    decision = one_step(stack, batch([case.inputs["reward"]], [0], lengths=[len(wanted)]))
    assert decision.advantages.tolist() == pytest.approx(wanted, rel=1e-6)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- counts


def test_forgetting_rate_is_a_saw_tooth_of_the_kl() -> None:
    p = TrackerParams()
    for kl, wanted in ((0.0, 0.875), (0.005, 0.9175), (0.01, 0.96), (0.0100001, 0.875), (5.0, 0.875)):
        assert forgetting_rate([kl], p) == pytest.approx(wanted)
    assert forgetting_rate([0.0, 0.02, 0.004], p) == pytest.approx(0.875 + 0.8 * 0.085)
    assert forgetting_rate([], p) == pytest.approx(0.9175)
    assert forgetting_rate([0.3], TrackerParams(rho=0.5)) == 0.5


def test_the_kl_is_a_mean_over_rows_of_means_over_tokens_and_the_window_slides() -> None:
    stack = baseline_stack(4, kl_window=2)
    rollouts = batch([1.0, 0.0], [0, 1], lengths=[1, 3])
    seen = []
    for scale in (0.5, 1.0, 2.0):
        d = torch.tensor([scale, 0.0, 0.0, 3.0 * scale], dtype=torch.float64)
        old = torch.full((4,), -1.0, dtype=torch.float64)
        one_step(stack, rollouts, make_tokens(rollouts, old_logprobs=old, ref_logprobs=old + d))
        k3 = [min(math.exp(x) - x - 1, 10.0) for x in (scale, 3 * scale)]  # verl's estimator ends at 10
        seen.append((k3[0] + k3[1] / 3) / 2)
        assert stack.methods[0].state["kl"] == pytest.approx(seen[-2:])


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_counts_and_advantages_equal_the_loop(data: st.DataObject) -> None:
    rows, size = data.draw(st.integers(1, 14)), data.draw(st.integers(1, 5))
    rho, v0 = data.draw(st.sampled_from([0.25, 0.9, 1.0])), data.draw(st.sampled_from([0.0, 0.3, 1.0]))
    threshold, normalize = data.draw(st.sampled_from([0.0, 0.5])), data.draw(st.booleans())
    stack = baseline_stack(size, rho=rho, initial_value=v0, success_threshold=threshold, normalize=normalize)
    alpha, beta = [8.0 * v0] * size, [8.0 * (1 - v0)] * size
    number = st.one_of(st.just(NAN), st.sampled_from([0.0, 0.5, 1.0]), st.floats(-1, 2))
    for _ in range(2):
        rewards = data.draw(st.lists(number, min_size=rows, max_size=rows))
        if all(math.isnan(r) for r in rewards):
            rewards[0] = 1.0
        prompts = data.draw(st.lists(st.integers(-1, size - 1), min_size=rows, max_size=rows))
        order = data.draw(st.permutations(range(rows)))
        rollouts = make_rollouts(
            [rewards[i] for i in order], [order[i] for i in range(rows)], prompt_index=[prompts[i] for i in order]
        )
        decision = one_step(stack, rollouts)
        raw = [r - (v0 if x < 0 else alpha[x] / (alpha[x] + beta[x])) for r, x in zip(rewards, prompts, strict=True)]
        scored = [v for v in raw if not math.isnan(v)]
        mean, scale = 0.0, 1.0
        if normalize and len(scored) > 1:
            mean = math.fsum(scored) / len(scored)
            scale = math.sqrt(max(math.fsum((v - mean) ** 2 for v in scored) / len(scored), 1e-6))
        for place, i in enumerate(order):
            wanted = 0.0 if math.isnan(raw[i]) else (raw[i] - mean) / scale
            assert float(decision.row_advantages[place]) == pytest.approx(wanted, rel=1e-9, abs=1e-9)
        for r, x in zip(rewards, prompts, strict=True):  # in the order of the plan, not of the rows
            if x >= 0 and not math.isnan(r):
                alpha[x] = rho * alpha[x] + (r > threshold)
                beta[x] = rho * beta[x] + 1 - (r > threshold)
        assert counts(stack)[0] == pytest.approx(alpha, rel=1e-12, abs=1e-12)
        assert counts(stack)[1] == pytest.approx(beta, rel=1e-12, abs=1e-12)


def test_counts_stay_in_their_range_and_tend_to_the_memory_of_rho() -> None:
    rng = np.random.default_rng(0)
    stack = baseline_stack(2, rho=0.9)
    for step in range(200):
        one_step(stack, batch((rng.random(2) < 0.3).astype(float), [0, 1], batch=step))
        total = stack.methods[0].state["alpha"] + stack.methods[0].state["beta"]
        assert bool((total > 0).all()) and bool((total <= 10 + 1e-9).all())
        values = stack.methods[0]._values(torch.arange(2))
        assert bool((values >= 0).all()) and bool((values <= 1).all())
    assert total.tolist() == pytest.approx([10, 10])
    plain = baseline_stack(2, rho=1.0)
    for reward in (1.0, 0.0, 1.0):
        one_step(plain, batch([reward], [1]))
    assert counts(plain) == ([4.0, 6.0], [4.0, 5.0])


def test_a_prompt_that_always_succeeded_has_value_one_until_it_fails() -> None:
    stack = baseline_stack(2, rho=0.9, initial_value=1.0)
    one_step(stack, batch([1.0], [0]))
    assert float(stack.methods[0]._values(torch.tensor([0]))) == 1.0 and counts(stack)[1] == [0.0, 0.0]
    one_step(stack, batch([0.0], [0]))
    assert 0.8 < float(stack.methods[0]._values(torch.tensor([0]))) < 1.0


def test_the_baseline_knows_nothing_of_its_own_batch() -> None:
    decisions = []
    for other in (0.0, 1.0):  # the outcome of the second rollout of the prompt does not reach the first one's baseline
        stack = baseline_stack(2, rho=0.9, normalize=False)
        decisions.append(one_step(stack, batch([1.0, other], [0, 0])))
    assert float(decisions[0].row_advantages[0]) == float(decisions[1].row_advantages[0]) == 0.5


def test_what_select_removed_counts_and_several_rows_of_a_rollout_count_once() -> None:
    class Failures(Method):
        """Failures leave."""

        name = "failures"

        def select(self, rollouts):
            return rollouts.reward > 0.5

    stack = baseline_stack(3, Failures(), rho=0.5)
    one_step(stack, batch([1.0, 0.0], [0, 1]))
    assert counts(stack) == ([3.0, 2.0, 4.0], [2.0, 3.0, 4.0])
    stack = baseline_stack(1, rho=0.5)
    rollouts = make_rollouts([1.0, 0.4, NAN], [0] * 3, prompt_index=[0] * 3, rollout=torch.zeros(3, dtype=torch.int64))
    one_step(stack, rollouts)
    assert counts(stack) == ([3.0], [2.0])  # one success, of mean reward 0.7


def test_batch_advantages_are_standardized_and_equal_raw_ones_are_zero() -> None:
    stack = baseline_stack(32, rho=0.9)
    rewards = np.random.default_rng(1).random(32)
    a = one_step(stack, batch(rewards, range(32))).row_advantages
    assert float(a.mean()) == pytest.approx(0, abs=1e-12) and float(a.var(correction=0)) == pytest.approx(1)
    assert stack.methods[0].claims() == ("plan", "advantages", "observe")
    equal = baseline_stack(8, rho=0.9)
    assert one_step(equal, batch([0.1] * 5, range(5))).row_advantages.tolist() == [0.0] * 5
    masked = one_step(baseline_stack(8, rho=0.9), batch([1.0, NAN, 0.0], range(3)))
    assert masked.row_advantages.tolist() == pytest.approx([1, 0, -1])


def test_order_of_rows_changes_neither_advantages_nor_counts() -> None:
    rng = np.random.default_rng(2)
    rewards, prompts = rng.integers(0, 2, 20).astype(float), rng.integers(0, 5, 20)
    results = []
    for order in (np.arange(20), rng.permutation(20)):
        stack = baseline_stack(5, rho=0.7)
        rollouts = make_rollouts(rewards[order], order.tolist(), prompt_index=prompts[order].tolist())
        a = torch.zeros(20, dtype=torch.float64)
        a[torch.from_numpy(order)] = one_step(stack, rollouts).row_advantages
        results.append((a, *counts(stack)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-12, atol=1e-14)
    assert results[0][1:] == results[1][1:]


def test_values_from_a_column() -> None:
    stack = baseline_stack(3, rho=0.9, dataset=Table([0.25, NAN, 1.0]), value_column="v0", initial_value=0.75)
    assert counts(stack) == ([2.0, 6.0, 8.0], [6.0, 2.0, 0.0])
    assert stack.needs == {"prompt_index", "column:v0"}
    with pytest.raises(MethodError, match="the column `v0` has the value 1.5; it must hold success rates"):
        baseline_stack(1, rho=0.9, dataset=Table([1.5]), value_column="v0")


# ---- one rollout per prompt


def generate(stack: MethodStack, group_size: int, prompts: int, size: int, rate: np.ndarray | None = None) -> Rollouts:
    """Plans as a host with this nominal group size does, and makes the rollouts."""
    proposal = [(stack.batch * prompts + i) % size for i in range(prompts)]
    plan = first_plan(stack, proposal, group_size, prompts * group_size, size)
    rows = [row for row in plan.rows for _ in range(row.n + row.spare)]
    index = [row.prompt_index for row in rows]
    chance = np.random.default_rng([9, stack.batch]).random(size)[index]
    rewards = (chance < (np.full(size, 0.5) if rate is None else rate)[index]).astype(float)
    return make_rollouts(rewards, [row.group for row in rows], prompt_index=index, batch=stack.batch)


@pytest.mark.parametrize("group_size", [1, 2, 4])
@pytest.mark.parametrize("sampler", [False, True])
def test_the_batch_is_full_of_prompts_with_one_rollout(group_size: int, sampler: bool) -> None:
    names = ["mssr", "mssr_prompts"] if sampler else ["mssr"]
    fixed = {"rho": 0.9}
    stack = build_stack(names, {"mssr_baseline": fixed, **({"mssr_prompts": fixed} if sampler else {})})
    stack.start(make_run(dataset_size=64, group_size=group_size))
    seen: list[int] = []
    for _ in range(6):
        rollouts = generate(stack, group_size, 8, 64)
        assert len(rollouts) == 8 * group_size  # as many rows as the host's batch has, none empty
        assert len(set(rollouts.group.tolist())) == len(set(rollouts.prompt_index.tolist())) == 8 * group_size
        seen += rollouts.prompt_index.tolist()
        decision = one_step(stack, rollouts)
        assert bool(decision.trained.all()) and decision.estimator == "mssr_baseline" and not decision.uniform
    total = stack.methods[0].state["alpha"] + stack.methods[0].state["beta"]
    visits = torch.bincount(torch.tensor(seen), minlength=64)
    assert torch.equal(total != 8, visits > 0)


def test_plan_is_changed_relative_to_what_is_given() -> None:
    plan = baseline_stack().methods[0].plan(make_plan(prompts=3, group_size=4))
    assert [(r.prompt_index, r.n, r.spare) for r in plan.rows] == [(0, 1, 0), (1, 1, 0), (2, 1, 0)]
    given_ = tuple(Completion((i,)) for i in range(4))
    odd = make_plan(prompts=0).replace(rows=(PlanRow(0, 0, 0, spare=2), PlanRow(1, 1, 3, spare=1, given=given_)))
    changed = baseline_stack().methods[0].plan(odd)
    assert [(r.n, r.spare, len(r.given)) for r in changed.rows] == [(0, 2, 0), (1, 1, 2)]


# ---- shaping


def shaped(a: list[float], old: list[float], entropies: list[float] | None = None, **params: Any) -> list[float]:
    """Token advantages after shaping, one token per row, behind an estimator that gives the reward."""

    class Raw(Method):
        name = "raw"

        def advantages(self, rollouts):
            return rollouts.reward

    rollouts = make_rollouts(a, lengths=[1] * len(a))
    tokens = make_tokens(rollouts, old_logprobs=torch.tensor(old), entropies=torch.tensor(entropies or old))
    return one_step(start_stack(Raw(), shaping(**params)), rollouts, tokens).advantages.tolist()


@settings(max_examples=40, deadline=None)
@given(
    rows=st.lists(st.tuples(st.floats(-3, 3), st.floats(-8, 0, width=32), st.floats(0, 4, width=32)), min_size=1),
    weight=st.sampled_from([0.0, 0.4, 3.0]),
    cap=st.sampled_from([1.0, 2.0, 10.0]),
    entropy=st.sampled_from(["sampled", "full"]),
)
def test_shaping_equals_the_loop_and_keeps_signs(rows: Any, weight: float, cap: float, entropy: str) -> None:
    a, old, full = (list(column) for column in zip(*rows, strict=True))
    found = shaped(a, old, full, entropy_weight=weight, cap=cap, entropy=entropy)
    for x, lp, h, y in zip(a, old, full, found, strict=True):
        bonus = min(weight * (-math.exp(lp) * lp if entropy == "sampled" else h), abs(x) / cap)
        assert y == pytest.approx(x + bonus, rel=1e-6, abs=1e-9)
        assert -1e-12 <= y - x <= abs(x) / cap + 1e-12
        assert y * x >= 0 and (cap == 1 or (y > 0) == (x > 0))
    if weight == 0:
        assert found == a


def test_no_bonus_without_entropy_or_advantage() -> None:
    assert shaped([1.0, -1.0, 0.0], [0.0, -1.0, -1.0]) == pytest.approx([1, -1 + 0.4 / math.e, 0])
    assert shaped([2.0], [-1.0], [0.0], entropy="full") == [2.0]


def test_only_what_the_entropy_needs_is_asked_for() -> None:
    assert shaping().needs == {"tokens", "old_logprobs"} and shaping(entropy="full").needs == {"tokens", "entropies"}
    assert MssrBaseline().needs == {"prompt_index", "tokens", "old_logprobs", "ref_logprobs"}
    assert baseline_stack(rho=0.9).needs == {"prompt_index"}
    hooks = {"plan", "advantages", "observe", "shape"}
    host = HostCapabilities("trl", "0", hooks, {}, (), {"ref_logprobs": "Set beta > 0."}, None, {})
    with pytest.raises(ConfigError, match="`mssr_baseline` needs log-probs of the reference policy: Set beta > 0"):
        preflight(build_stack("mssr"), host)
    assert preflight(build_stack("mssr", {"mssr_baseline": {"rho": 0.96}}), host) == {}


# ---- the sampler


def prompts_stack(size: int, seed: int = 0, **params: Any) -> MethodStack:
    method = MssrPrompts(build_params(MssrPrompts.Params, {"rho": 0.9, **params}, "mssr_prompts"))
    return start_stack(method, seed=seed, run=make_run(dataset_size=size))


def choose(stack: MethodStack, size: int, n: int, taken: tuple[int, ...] = (), step: int = 0) -> list[int]:
    stack.batch = step
    return list(stack.one("select_prompts", PromptPool(size, (), taken, None, step), n))


def test_prompts_are_drawn_in_proportion_to_the_standard_deviation_of_their_outcome() -> None:
    value = torch.tensor([0.5, 0.1, 0.02, 1.0, 0.0], dtype=torch.float64)
    for priority in (0.0, 1.0, 2.0):
        stack = prompts_stack(5, priority=priority)
        counts = {"alpha": 8 * value, "beta": 8 * (1 - value)}
        stack.methods[0].state = {**stack.methods[0].state, **counts, "tried": torch.ones(5, dtype=torch.bool)}
        weight = (torch.sqrt(value * (1 - value)) + 1e-6) ** priority
        expected = (weight / weight.sum()).tolist()
        count = np.bincount([choose(stack, 5, 1, step=s)[0] for s in range(3000)], minlength=5) / 3000
        for found, p in zip(count, expected, strict=True):
            assert abs(found - p) < 5 * math.sqrt(p * (1 - p) / 3000) + 1e-3
        logged = combine([stack.metrics.take()])
        assert logged["mssr_prompts/weight"] == pytest.approx(float(weight.mean()))


@pytest.mark.parametrize(("low", "largest"), [(0.2, 1.0), (1e-9, 1.0)])
def test_a_draw_from_many_prompts_looks_at_few_and_keeps_the_proportions(low: float, largest: float) -> None:
    """Of 80,000 prompts the first 2,000 weigh 1, all others `low`; with 1e-9 hardly one is accepted."""
    looked = [0]

    def weights(rows: torch.Tensor) -> torch.Tensor:
        looked[0] += len(rows)
        return torch.where(rows < 2000, 1.0, low).double()

    def draw(n: int, taken: set[int], seed: int) -> list[int]:
        return weighted_draw(weights, largest, 80_000, n, taken, np.random.default_rng(seed))

    found = [draw(400, set(), seed) for seed in range(10)]
    assert all(len(set(rows)) == 400 for rows in found) and not any(np.array_equal(found[0], f) for f in found[1:])
    share, expected = np.mean(np.array(found) < 2000), 2000 / (2000 + 78_000 * low)
    assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / 4000) + 0.01
    assert len(np.unique(np.array(found) % 10)) == 10
    whole = draw(400, set(), 3)
    assert draw(150, set(), 3) + draw(250, set(whole[:150]), 3) == whole, "a further call continues the draw"
    if low > 0.1:
        looked[0] = 0
        draw(400, set(), 0)
        assert looked[0] < 8000
    rest = draw(10, set(range(79_990)), 0)
    assert sorted(rest) == list(range(79_990, 80_000)), "the last prompts that are left"


def test_a_prompt_that_was_never_tried_has_the_largest_weight() -> None:
    """The authors' 0.5 + epsilon, whatever `initial_value` says of the baseline."""
    for priority in (1.0, 3.0):
        stack = prompts_stack(4, priority=priority, initial_value=0.05, rho=None, rho_min=0.5, target_kl=1.0)
        choose(stack, 4, 1)
        assert combine([stack.metrics.take()])["mssr_prompts/weight"] == pytest.approx((0.5 + 1e-6) ** priority)
        rollouts = make_rollouts([1.0, math.nan, 0.0, 0.0], prompt_index=[0, 1, 2, -1])
        zero = torch.zeros(4)
        tokens = make_tokens(rollouts.replace(length=torch.ones(4, dtype=torch.int64)))
        tokens = tokens.replace(old_logprobs=zero, ref_logprobs=zero)
        one_step(stack, rollouts, tokens)
        assert stack.methods[0].state["tried"].tolist() == [1, 0, 1, 0]
        stack.metrics.take()
        choose(stack, 4, 1, step=1)
        # N0 = 2; rho is 0.5 without KL: a = 0.5 * 0.1 + o, b = 0.5 * 1.9 + 1 - o
        value = [1.05 / 2, 0.05 / 2]
        weights = [(math.sqrt(v * (1 - v)) + 1e-6) ** priority for v in value] + [(0.5 + 1e-6) ** priority] * 2
        assert combine([stack.metrics.take()])["mssr_prompts/weight"] == pytest.approx(sum(weights) / 4)


def test_values_of_the_dataset_count_as_tried() -> None:
    column = [0.9, math.nan, 0.0]
    method = MssrPrompts(build_params(MssrPrompts.Params, {"rho": 0.9, "value_column": "rate"}, "mssr_prompts"))
    stack = start_stack(method, run=make_run(dataset=[{"rate": v} for v in column], dataset_size=3, columns=("rate",)))
    assert method.state["tried"].tolist() == [1, 0, 1]
    choose(stack, 3, 1)
    weights = [0.3 + 1e-6, 0.5 + 1e-6, 1e-6]
    assert combine([stack.metrics.take()])["mssr_prompts/weight"] == pytest.approx(sum(weights) / 3)


def test_a_draw_is_unique_repeatable_and_continued() -> None:
    first, same, other = prompts_stack(40, 1), prompts_stack(40, 1), prompts_stack(40, 2)
    a = choose(first, 40, 12)
    assert len(set(a)) == 12 and choose(same, 40, 12) == a and choose(other, 40, 12) != a
    assert choose(first, 40, 12, step=1) != a
    assert choose(first, 40, 7, taken=(*a[:5], -1)) == a[5:]
    assert sorted(choose(first, 40, 40)) == list(range(40))


def test_the_sampler_works_beside_grpo_with_groups() -> None:
    """Its counts are its own, and every rollout of a group is an outcome."""
    stack = prompts_stack(6, rho=0.5)
    one_step(stack, make_rollouts([1.0, 1.0, 0.0, 1.0], [0] * 4, prompt_index=[3] * 4))
    alpha, beta = counts(stack)
    assert alpha[3] == pytest.approx((((4 / 2 + 1) / 2 + 1) / 2 + 0) / 2 + 1)
    assert beta[3] == pytest.approx(4 / 16 + 1 / 2)
    assert alpha[:3] == [4.0] * 3
    assert stack.methods[0].claims() == ("select_prompts", "observe")


def test_hard_and_easy_prompts_come_less_often_in_a_run() -> None:
    rate = np.array([0.0] * 20 + [0.5] * 20 + [1.0] * 20)
    stack = build_stack(["mssr", "mssr_prompts"], {"mssr_baseline": {"rho": 0.9}, "mssr_prompts": {"rho": 0.9}})
    stack.start(make_run(dataset_size=60, group_size=2))
    visits = np.zeros(60)
    for _ in range(80):
        rollouts = generate(stack, 2, 8, 60, rate)
        visits[rollouts.prompt_index.numpy()] += 1
        one_step(stack, rollouts)
    never, middle, always = visits.reshape(3, 20).sum(1) / visits.sum()
    assert middle > 1.2 * never and middle > 1.2 * always


# ---- the bundle, state, errors


def test_the_bundle_has_the_papers_parts() -> None:
    bundle = registry.load("mssr")
    assert isinstance(bundle, Bundle) and list(bundle.parts) == ["mssr_baseline", "mssr_shaping"]
    stack = build_stack(["mssr", "-mssr_shaping"])
    assert stack.names == ["mssr_baseline"]  # the paper's ablation MVSR
    assert build_stack(["vade", "mssr"]).names == ["vade", "mssr_baseline", "mssr_shaping"]
    with pytest.raises(ConfigError, match="both decide `select_prompts`"):
        build_stack(["vade", "mssr_prompts"])
    with pytest.raises(ConfigError, match="both decide `advantages`"):
        build_stack(["mssr", "mc_grpo"])


def decided(d: Decision) -> list[Any]:
    return [d.rollouts.prompt_index.tolist(), d.advantages.tolist(), d.keep_tokens.tolist()]


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def new() -> MethodStack:
        stack = build_stack(["mssr", "mssr_prompts"], seed=3)
        stack.start(make_run(dataset_size=40, group_size=2))
        return stack

    def step(stack: MethodStack) -> list[Any]:
        rollouts = generate(stack, 2, 6, 40)
        return decided(one_step(stack, rollouts, make_tokens(rollouts, seed=stack.batch)))

    stack = new()
    for _ in range(12):
        step(stack)
    save_state(tmp_path, stack.state_dict("data"))
    rest = [step(stack) for _ in range(4)]
    resumed = new()
    resumed.load_state_dict(load_state(tmp_path) or {}, "data")
    assert len(resumed.methods[0].state["kl"]) == 10
    assert [step(resumed) for _ in range(4)] == rest
    for a, b in zip(stack.methods, resumed.methods, strict=True):
        assert {k: v.tolist() if k != "kl" else v for k, v in a.state.items()} == {
            k: v.tolist() if k != "kl" else v for k, v in b.state.items()
        }
    forgetful = new()
    forgetful.batch, forgetful.draw, forgetful.extra_prompts = 12, 0, stack.extra_prompts
    assert [step(forgetful) for _ in range(4)] != rest


def test_metrics_through_the_driver(caplog: pytest.LogCaptureFixture) -> None:
    stack = build_stack("mssr")
    stack.start(make_run(dataset_size=16))
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        one_step(stack, batch([1.0, 0.0, 1.0, 1.0], range(4)))
    assert not caplog.messages  # a baseline that is not the group's works with one row
    logged = combine([stack.metrics.take()])
    names = {"mssr_baseline/baseline", "mssr_baseline/error", "mssr_baseline/rho", "mssr_baseline/success"}
    assert set(logged) == names | {"mssr_shaping/bonus", "mssr_shaping/capped"}
    assert logged["mssr_baseline/baseline"] == 0.5 and logged["mssr_baseline/error"] == 0.25
    assert logged["mssr_baseline/success"] == 0.75
    assert 0 < logged["mssr_shaping/bonus"] <= 0.4 / math.e


@pytest.mark.parametrize(
    ("method", "values", "wrong"),
    [
        ("mssr_baseline", {"rho": 0}, "rho"),
        ("mssr_baseline", {"rho_min": 1}, "rho_min"),
        ("mssr_baseline", {"rho_max": 0.5}, "`rho_max` is 0.5, below `rho_min` = 0.875"),
        ("mssr_baseline", {"target_kl": 0}, "target_kl"),
        ("mssr_baseline", {"kl_window": 0}, "kl_window"),
        ("mssr_baseline", {"initial_value": 1.1}, "initial_value"),
        ("mssr_shaping", {"cap": 0}, "cap"),
        ("mssr_shaping", {"entropy_weight": -0.1}, "entropy_weight"),
        ("mssr_shaping", {"entropy": "half"}, "entropy"),
        ("mssr_prompts", {"priority": -1}, "priority"),
    ],
)
def test_parameters_out_of_range(method: str, values: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ConfigError, match=f"Method `{method}`: .*{wrong}"):
        build_stack(method, {method: values})


def test_a_value_column_is_read_whole() -> None:
    """Not row by row: with a million rows that took a minute."""
    import datasets

    class Watched(datasets.Dataset):
        def __getitem__(self, key: object) -> object:
            assert not isinstance(key, int), "a row was read"
            return super().__getitem__(key)

    from rl_plugins.kit.priors import Column

    values = [0.25, float("nan"), 1.0, 0.1 + 0.2]
    for column in (values, [0, 1, 1, 0]):
        rows = datasets.Dataset.from_dict({"prompt": ["a", "b", "c", "d"], "rate": column}).select([3, 0, 1, 2])
        prior = Column("rate")
        prior._size, prior._dataset = 4, rows
        one_by_one = [prior.predict({}, torch.tensor([i])) for i in range(4)]
        prior._size, prior._dataset = 4, Watched(rows.data, rows.info, rows.split, rows._indices)
        whole = prior.predict({}, torch.arange(4))
        assert torch.equal(whole.nan_to_num(7), torch.cat(one_by_one).nan_to_num(7)) and whole.dtype == torch.float64
