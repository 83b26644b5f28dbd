"""V_0.5 (arXiv 2603.10848): the fused baseline, the extra rollouts, the priors, and all through the driver."""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import GroupSoFar, Plan, PlanRow, Rollouts
from rl_plugins.kit.priors import BetaPosterior, Nearest
from rl_plugins.methods.v0_5 import V05, fuse, next_gain
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan, next_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

GOLDEN = Golden("v0_5")
NAN = math.nan
PAPER = {"reward_low": -1.0, "reward_high": 1.0}
PROMPTS = 16


class Table:
    """A dataset with random access."""

    column_names = ["prompt", "guess"]

    def __len__(self) -> int:
        return PROMPTS

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": f"question {i}"}], "extra_info": {"guess": i / 10}}


def v0_5_stack(seed: int = 0, group_size: int = 8, **params: Any) -> tuple[MethodStack, V05]:
    method = V05(build_params(V05.Params, {**PAPER, **params}, "v0_5"))
    run = make_run(dataset=Table(), dataset_size=PROMPTS, columns=("prompt", "guess"), group_size=group_size)
    return start_stack(method, seed=seed, run=run), method


def constant(value: float, **params: Any) -> MethodStack:
    return v0_5_stack(prior="constant", prior_value=value, **params)[0]


def advantages(stack: MethodStack, rollouts: Rollouts) -> list[float]:
    return stack.one("advantages", rollouts).tolist()


def number(x: float) -> torch.Tensor:
    return torch.tensor([x], dtype=torch.float64)


# ---- the rule


@GOLDEN.kind("prior")
def check_fusion(case: Case) -> None:
    """The rule as a note prints it, and what a batch of such rewards makes of it through the method."""
    mean, prior, k = (case.inputs[name] for name in ("mean", "prior", "k"))
    s2, cost, wanted = case.params["s2"], case.params["c"], case.expected
    found = fuse(number(mean), number(k), number(prior), s2)
    gain = float(next_gain(found.bias2, number(k), s2))
    values = {"bias2": found.bias2, "weight": found.weight, "baseline": found.baseline}
    for name, value in values.items():
        assert float(value) == pytest.approx(wanted[name], abs=1e-12), name
    assert gain == pytest.approx(wanted["gain"], abs=1e-12) and (gain > cost) == wanted["more"]

    half = math.sqrt(s2)  # rewards of +-half have this variance at most
    stack = constant(prior, reward_low=-half, reward_high=half, k_init=k, k_max=k + 1, cost=cost, group_size=k + 1)
    rewards = torch.full((k,), mean, dtype=torch.float64)
    plan = next_plan(stack, Plan((), k + 1, 1, 1, (GroupSoFar(PlanRow(0, 0, k), rewards),)))
    assert [row.n for row in plan.rows] == [1] * wanted["more"]
    rollouts = make_rollouts(rewards, [0] * k, prompt_index=[0] * k)
    assert advantages(stack, rollouts) == pytest.approx([mean - wanted["baseline"]] * k, abs=1e-9)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


@pytest.mark.parametrize(
    ("m", "v", "k", "bias2", "weight", "baseline", "gain"),
    [
        (0.5, 0.4, 4, 0.0, 0.0, 0.4, 0.0),
        (1.0, 0.0, 4, 0.75, 0.75, 0.75, 0.0296),
        (-1.0, 1.0, 4, 3.75, 0.9375, -0.875, 0.0445),
        (0.25, -0.5, 8, 0.4375, 0.77778, 0.08333, 0.0086),
    ],
)
def test_worked_numbers(m: float, v: float, k: int, bias2: float, weight: float, baseline: float, gain: float) -> None:
    found = fuse(number(m), number(k), number(v), 1.0)
    assert float(found.bias2) == pytest.approx(bias2)
    assert float(found.weight) == pytest.approx(weight, abs=5e-6)
    assert float(found.baseline) == pytest.approx(baseline, abs=5e-6)
    assert float(next_gain(found.bias2, number(k), 1.0)) == pytest.approx(gain, abs=5e-5)


def test_where_averaging_stops_paying() -> None:
    """The default cost: with a hopeless prior the gain tends to s2/(k(k+1)), 1/240 at k = 15 and 1/272 at 16."""
    far = number(1e9)
    assert float(next_gain(far, number(15), 1.0)) == pytest.approx(1 / 240, rel=1e-6)
    assert float(next_gain(far, number(16), 1.0)) < 1 / 256 < float(next_gain(far, number(15), 1.0))


@settings(max_examples=60, deadline=None)
@given(m=st.floats(-1, 1), v=st.floats(-1, 1), k=st.integers(1, 64), s2=st.floats(0.05, 4), scale=st.floats(0.1, 10))
def test_properties_of_the_fusion(m: float, v: float, k: int, s2: float, scale: float) -> None:
    found = fuse(number(m), number(k), number(v), s2)
    baseline, weight = float(found.baseline), float(found.weight)
    assert min(m, v) - 1e-12 <= baseline <= max(m, v) + 1e-12
    if (m - v) ** 2 <= s2 / k:
        assert baseline == v and weight == 0.0 and float(next_gain(found.bias2, number(k), s2)) == 0.0
    more = fuse(number(m), number(k + 1), number(v), s2)
    assert float(more.weight) >= weight - 1e-12
    further = fuse(number(v + 1.5 * (m - v)), number(k), number(v), s2)
    assert float(further.weight) >= weight - 1e-12
    # the same on another scale
    moved = fuse(number(3 + scale * m), number(k), number(3 + scale * v), s2 * scale**2)
    assert float(moved.baseline) == pytest.approx(3 + scale * baseline, abs=1e-7 * scale)
    # the gain is what it says: the fall of the least error, and falls with k
    d2, error = float(found.bias2), lambda k: float(found.bias2) * s2 / (k * float(found.bias2) + s2)
    assert float(next_gain(found.bias2, number(k), s2)) == pytest.approx(error(k) - error(k + 1), abs=1e-12)
    assert float(next_gain(found.bias2, number(k + 1), s2)) <= float(next_gain(found.bias2, number(k), s2))
    if d2:
        least = min(w**2 * s2 / k + (1 - w) ** 2 * d2 for w in np.linspace(0, 1, 101))
        assert error(k) <= least + 1e-12


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_equals_the_loop(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 16))
    group = data.draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    rewards = data.draw(
        st.lists(st.one_of(st.just(NAN), st.sampled_from([-1.0, 1.0]), st.floats(-1, 1)), min_size=rows, max_size=rows)
    )
    guess = data.draw(st.lists(st.one_of(st.just(NAN), st.floats(-1.5, 1.5)), min_size=5, max_size=5))
    loo = data.draw(st.booleans())
    wanted = []
    for r, g in zip(rewards, group, strict=True):
        others = [x for x, h in zip(rewards, group, strict=True) if h == g and not math.isnan(x)]
        if math.isnan(r):
            wanted.append(0.0)
            continue
        if loo:
            others.remove(r)
        v, k = min(max(guess[g], -1.0), 1.0) if not math.isnan(guess[g]) else NAN, len(others)
        if not others:
            baseline = v
        elif math.isnan(v):
            baseline = sum(others) / k
        else:
            m = sum(others) / k
            d2 = max(0.0, (m - v) ** 2 - 1 / k)
            w = d2 / (d2 + 1 / k)
            baseline = w * m + (1 - w) * v
        wanted.append(0.0 if math.isnan(baseline) else r - baseline)

    stack, _ = v0_5_stack(leave_one_out=loo, prior=lambda prompts, context: [guess[int(t[9:])] for t in prompts])
    assert advantages(stack, make_rollouts(rewards, group)) == pytest.approx(wanted, abs=1e-9)


def test_without_a_prior_it_is_grpo_without_the_division() -> None:
    stack, _ = v0_5_stack()
    rewards = [1.0, -1, -1, 1, 1, 1, -1, 1]
    decision = one_step(stack, make_rollouts(rewards))
    assert decision.row_advantages.tolist() == pytest.approx([1, -1, -1, 1, 0.5, 0.5, -1.5, 0.5])


def test_equal_rewards_still_give_a_signal() -> None:
    assert advantages(constant(0.2), make_rollouts([1.0] * 4)) == pytest.approx([1 - (0.2 + 0.39 / 0.64 * 0.8)] * 4)
    assert advantages(constant(1.0), make_rollouts([1.0] * 4)) == [0.0] * 4


def test_a_group_of_one_and_groups_without_a_reward() -> None:
    found = advantages(constant(0.5), make_rollouts([1.0, NAN, NAN, 0.5], [0, 1, 1, 2]))
    assert found == pytest.approx([0.5, 0.0, 0.0, 0.0])
    stack, _ = v0_5_stack()
    assert advantages(stack, make_rollouts([1.0, NAN, NAN, 0.5], [0, 1, 1, 2])) == [0.0] * 4


def test_values_outside_of_the_bounds_are_clipped_and_such_rewards_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    stack = constant(3.0)
    assert advantages(stack, make_rollouts([1.0, 1.0])) == [0.0, 0.0]
    assert not caplog.records
    advantages(stack, make_rollouts([1.0, 7.0]))
    assert "rewards go from 1 to 7, outside the bounds -1 to 1" in caplog.text


def test_norms() -> None:
    rewards, group = [1.0, -1.0, -1.0, 1.0, 1.0, 1.0], [0, 0, 0, 0, 1, 1]
    plain = np.array(advantages(constant(0.0), make_rollouts(rewards, group)))
    assert plain[4:] == pytest.approx([1 / 2] * 2)  # m = 1, D2 = 1/2, w = 1/2
    by_group = advantages(constant(0.0, advantage_norm="group"), make_rollouts(rewards, group))
    rms = [np.sqrt(np.mean(plain[:4] ** 2))] * 4 + [np.sqrt(np.mean(plain[4:] ** 2))] * 2
    assert by_group == pytest.approx(plain / (np.array(rms) + 1e-4))
    by_batch = advantages(constant(0.0, advantage_norm="batch"), make_rollouts(rewards, group))
    assert by_batch == pytest.approx(plain / (np.sqrt(np.mean(plain**2)) + 1e-4))


def test_rollouts_of_several_rows_count_once() -> None:
    rollout, index = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 0])
    rollouts = make_rollouts([1.0, 1.0, 1.0, -1.0], [0] * 4, rollout=rollout, index=index)
    assert advantages(constant(0.1), rollouts) == pytest.approx([0.9] * 3 + [-1.1])  # (0 - 0.1)^2 < 1/2
    stack, _ = v0_5_stack()
    assert advantages(stack, rollouts) == pytest.approx([1.0] * 3 + [-1.0])


# ---- extra rollouts


def rounds(stack: MethodStack, rewards: Any, prompts: int, group_size: int, limit: int = 64) -> tuple[Rollouts, int]:
    """Plans and generates one batch round by round; `rewards[prompt]` are its rollouts' rewards in order."""
    budget = prompts * group_size
    rows = list(first_plan(stack, range(prompts), group_size, budget, PROMPTS).rows)
    for n in range(1, limit):
        counts = {row.group: sum(r.n for r in rows if r.group == row.group) for row in rows}
        so_far = tuple(
            GroupSoFar(next(r for r in rows if r.group == g), torch.tensor(rewards[g][:c]).double())
            for g, c in counts.items()
        )
        plan = next_plan(stack, Plan((), group_size, budget - sum(r.n for r in rows), n, so_far, stack.batch))
        if not plan.rows:
            break
        rows += plan.rows
    prompt = [row.prompt_index for row in rows for _ in range(row.n)]
    group = [row.group for row in rows for _ in range(row.n)]
    number = [group[:i].count(g) for i, g in enumerate(group)]
    values = [float(rewards[p][i]) for p, i in zip(prompt, number, strict=True)]
    return make_rollouts(values, group, prompt_index=prompt), n


def test_rounds_serve_those_that_contradict_the_prior() -> None:
    """V = 0. A prompt with m = 0 stops at 4; one that always succeeds has D2 = 1 - 1/k and goes on until the gain
    is 1/274 at k = 15."""
    stack = constant(0.0)
    rewards = [[1, -1] * 8, [1] * 16]
    rollouts, n = rounds(stack, rewards, 2, 16)
    assert torch.bincount(rollouts.group).tolist() == [4, 15] and n == 12
    decision = one_step(stack, rollouts, budget=32)
    weight = 1 - 1 / 15
    assert decision.row_advantages[:4].tolist() == [1, -1, 1, -1]
    assert decision.row_advantages[4:].tolist() == pytest.approx([1 - weight] * 15)
    logged = combine([stack.metrics.take()])
    assert logged["v0_5/believed"] == 0.5 and logged["v0_5/data_weight"] == pytest.approx(weight / 2)
    assert logged["v0_5/rollouts"] == 9.5 and logged["v0_5/prior_error"] == 0.5 and logged["v0_5/unknown"] == 0


def test_stop_is_where_the_rule_says() -> None:
    """The oracle: one more as long as the gain at the mean so far is above 1/256."""
    rng = np.random.default_rng(0)
    rewards = np.where(rng.random((6, 16)) < np.linspace(0.1, 0.95, 6)[:, None], 1.0, -1.0)
    value = -0.3
    rollouts, _ = rounds(constant(value), rewards.tolist(), 6, 16)
    for i, own in enumerate(rewards):
        k = 4
        while k < 16:
            d2 = max(0.0, (own[:k].mean() - value) ** 2 - 1 / k)
            if d2**2 / ((k * d2 + 1) * ((k + 1) * d2 + 1)) <= 1 / 256:
                break
            k += 1
        assert int((rollouts.group == i).sum()) == k
    sizes = torch.bincount(rollouts.group)
    assert sizes.min() == 4 and sizes.max() > 8


def test_the_largest_gain_first_when_the_batch_is_nearly_full() -> None:
    stack = constant(0.0, increment=3)
    rewards = [[1, 1, 1, -1] * 4, [1] * 16, [1, -1] * 8]  # gains: .0024 (m = .5, D2 = 0), .0296, 0
    rollouts, _ = rounds(stack, rewards, 3, 5)
    assert torch.bincount(rollouts.group).tolist() == [4, 7, 4]  # 15 rows in all


def test_increment_does_not_pass_the_maximum() -> None:
    rollouts, n = rounds(constant(0.0, increment=5, k_max=10, cost=0), [[1] * 16, [-1] * 16], 2, 16)
    assert torch.bincount(rollouts.group).tolist() == [10, 10] and n == 3


def test_cost_from_nothing_to_everything() -> None:
    rewards = [[1, -1] * 8, [1, 1, 1, -1] * 4, [1] * 16]
    sizes = lambda **params: torch.bincount(rounds(constant(0.0, **params), rewards, 3, 16)[0].group).tolist()
    assert sizes(cost=math.inf) == [4, 4, 4]
    assert sizes(cost="inf") == [4, 4, 4]
    assert sizes(cost=0.0) == [4, 4, 16]  # m = 0.5 is within the noise of 4


def test_groups_without_a_reward_or_a_prior_ask_for_no_more() -> None:
    plan = lambda *rewards: Plan(
        (), 8, 99, 1, tuple(GroupSoFar(PlanRow(i, i, 4), torch.tensor(r)) for i, r in enumerate(rewards))
    )
    stack = constant(0.0)
    assert next_plan(stack, plan([NAN] * 4)).rows == ()
    asking = next_plan(stack, plan([NAN] * 4, [1.0] * 4, [NAN, 1.0, 1.0, 1.0])).rows
    assert [r.group for r in asking] == [2, 1]  # of three rewards the next one tells more
    stack, _ = v0_5_stack()
    assert next_plan(stack, plan([1.0] * 4)).rows == ()


def test_later_rounds_keep_the_row_and_leave_room_for_others() -> None:
    stack = constant(0.0, increment=4)
    row = PlanRow(3, 7, 4, spare=2, edit={"prompt": "hint"}, prefix=(1,), max_tokens=5)
    so_far = (GroupSoFar(row, torch.ones(6)),)
    other = PlanRow(5, 9, 2)
    plan = stack.call("plan", stack.methods[0], Plan((other,), 8, 5, 1, so_far))
    assert plan.rows == (other, row.replace(n=3, spare=0))
    first = stack.call("plan", stack.methods[0], Plan((PlanRow(0, 0, 8), PlanRow(1, 1, 2, spare=1)), 8, 16))
    assert [(r.n, r.spare) for r in first.rows] == [(4, 0), (2, 1)]


def test_zero_to_one_rewards_are_the_same_rule() -> None:
    rewards = np.where(np.random.default_rng(1).random((4, 16)) < 0.8, 1.0, -1.0)
    one, _ = rounds(constant(-0.2), rewards.tolist(), 4, 16)
    half = constant(0.4, reward_low=0.0, reward_high=1.0)
    two, _ = rounds(half, (rewards / 2 + 0.5).tolist(), 4, 16)
    assert torch.equal(one.group, two.group)
    assert advantages(constant(-0.2), one) == pytest.approx([2 * a for a in advantages(half, two)])


# ---- priors


def test_running_mean_predicts_from_earlier_batches_only() -> None:
    stack, method = v0_5_stack(prior_decay=0.5)
    one_step(stack, make_rollouts([1.0, 1, 1, -1], prompt_index=[2] * 4))
    assert method.prior.predict(method.state, torch.tensor([2, 3, -1])).tolist() == [0.5, 0.5, 0.5]
    one_step(stack, make_rollouts([-1.0, -1, -1, -1, 1, 1, NAN, NAN], prompt_index=[2] * 4 + [3] * 4))
    mean = (0.5 * 2 - 4) / (0.5 * 4 + 4)
    found = method.prior.predict(method.state, torch.tensor([2, 3, 4]))
    assert found.tolist() == pytest.approx([mean, 1.0, (mean + 1) / 2])
    # the baseline of the next batch: (1 - mean)^2 = 2.25 > 1/2
    d2 = (1 - mean) ** 2 - 1 / 2
    baseline = mean + d2 / (d2 + 1 / 2) * (1 - mean)
    assert advantages(stack, make_rollouts([1.0, 1.0], prompt_index=[2, 2])) == pytest.approx([1 - baseline] * 2)


def test_state_survives(tmp_path: Any) -> None:
    for params in (
        {},
        {"prior": "nearest", "context_size": 6},
        {"prior": lambda p, c: [sum(v for _, v in c)] * len(p)},
    ):
        stack, method = v0_5_stack(**params)
        for step in range(3):
            one_step(stack, make_rollouts([1.0, -1, -1, 1] * 2, prompt_index=[step] * 4 + [5] * 4))
        folder = tmp_path / str(len(method.state))
        save_state(folder, stack.state_dict("d"))
        other, resumed = v0_5_stack(**params)
        other.load_state_dict(load_state(folder), "d")
        rollouts = make_rollouts([1.0, -1, 1, 1], prompt_index=[5] * 4)
        assert advantages(stack, rollouts) == advantages(other, rollouts)


def test_column_also_of_a_nested_field() -> None:
    stack, method = v0_5_stack(prior="column", prior_column="guess")
    assert method.needs == {"prompt_index", "column:guess"}
    assert method.prior.predict({}, torch.tensor([3, -1, 9])).tolist() == pytest.approx([0.3, NAN, 0.9], nan_ok=True)
    assert advantages(stack, make_rollouts([0.5, 0.5], prompt_index=[4, 4])) == pytest.approx([0.1, 0.1])
    stack, _ = v0_5_stack(prior="column", prior_column="nothing")
    with pytest.raises(MethodError, match=r"no column `nothing` \(it has: extra_info, prompt\)"):
        one_step(stack, make_rollouts([0.5]))


def test_a_function_sees_texts_and_the_latest_outcomes_once_per_batch() -> None:
    calls: list[Any] = []

    async def values(prompts: list[str], context: list[tuple[str, float]]) -> list[float]:
        await asyncio.sleep(0)
        calls.append((prompts, context))
        return [0.0] * len(prompts)

    stack, method = v0_5_stack(prior=values, context_size=5)
    assert method.needs == {"prompt_index", "column:prompt"}
    rollouts, _ = rounds(stack, [[1] * 16, [1] * 16], 2, 8)
    one_step(stack, rollouts, budget=16)
    assert calls == [(["question 0", "question 1"], [])]
    one_step(stack, make_rollouts([1.0, NAN, -1.0], [0, 0, 1], prompt_index=[3, 3, 4]))
    assert len(calls) == 2 and len(calls[1][1]) == 5
    one_step(stack, make_rollouts([1.0], prompt_index=[3]))
    assert calls[2][1][-2:] == [("question 3", 1.0), ("question 4", -1.0)] and len(calls[2][1]) == 5


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda prompts, context: [0.0], "2 answers are needed"),
        (lambda prompts, context: ["x"] * 2, "'x' is not a number"),
        (lambda prompts, context: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_a_prior_that_fails_names_itself(function: Any, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stack, method = v0_5_stack(prior=function)
    monkeypatch.setattr(method.prior._service, "backoff", 0.0)
    with pytest.raises(MethodError, match=f"`v0_5` failed in `advantages`.*The value prior.*{text}"):
        one_step(stack, make_rollouts([1.0, -1.0], [0, 1]))


def test_context_keeps_the_newest_and_a_sample_of_a_large_batch() -> None:
    prior, rng = Nearest(4, "prompt", 2), np.random.default_rng(0)
    state = prior.start(make_run(dataset=Table()))
    put = lambda state, p, v: prior.observe(state, torch.tensor(p), torch.tensor(v).double(), rng)
    state = put(state, [0, 1, -1], [0.0, 1.0, 5.0])
    assert state["prompt"].tolist() == [0, 1] and state["value"].tolist() == [0.0, 1.0]
    state = put(state, [2, 3, 4], [2.0, 3.0, 4.0])
    assert state["prompt"].tolist() == [1, 2, 3, 4] and state["batches"] == 2
    many = put(state, list(range(10)), [float(i) for i in range(10)])
    kept = many["prompt"].tolist()
    assert len(kept) == 4 and kept == sorted(kept) and many["value"].tolist() == kept and kept != [6, 7, 8, 9]


def test_nearest_goes_by_likeness() -> None:
    class Words(Table):
        texts = ("add the numbers 1 2 3", "translate the poem", "add the numbers 4 5 6", "#", "")

        def __getitem__(self, i: int) -> dict[str, Any]:
            return {"prompt": self.texts[i]}

    prior = Nearest(64, "prompt", 2)
    state = prior.start(make_run(dataset=Words()))
    assert prior.predict(state, torch.tensor([0])).isnan().all()
    prompts = torch.tensor([0] * 8 + [1] * 8)
    state = prior.observe(state, prompts, (prompts == 0).double(), np.random.default_rng(0))
    same, other, alike, unlike, foreign = prior.predict(state, torch.tensor([0, 1, 2, 3, -1])).tolist()
    assert same > alike > 0.55 > 0.45 > other
    assert unlike == foreign == 0.5
    assert not prior.predict(state, torch.tensor([4])).isnan().any()  # an empty prompt
    ((itself, unequal),) = prior.similarity(torch.tensor([0]), torch.tensor([0, 1])).tolist()
    counts = [Counter(t[i : i + n] for n in (1, 2, 3) for i in range(len(t) - n + 1)) for t in Words.texts[:2]]
    norms = [math.sqrt(sum(c * c for c in count.values())) for count in counts]
    cosine = sum(c * counts[1][gram] for gram, c in counts[0].items()) / norms[0] / norms[1]
    assert itself == pytest.approx(1) and unequal == pytest.approx(cosine * (18 / 21) ** 2, rel=0.05)  # hash collisions
    assert same == pytest.approx((0.5 + 8 * 1 + 8 * unequal * 0) / (1 + 8 + 8 * unequal))


def test_beta_posterior() -> None:
    prior, run = BetaPosterior(0.5, guess_unseen=False), make_run(dataset_size=4)
    state = prior.start(run)
    assert prior.predict(state, torch.tensor([0])).isnan().all()
    state = prior.observe(state, torch.tensor([1, 1, 1]), torch.tensor([1.0, 1.0, 0.0]), np.random.default_rng(0))
    found = prior.predict(state, torch.tensor([1, 0, -1])).tolist()
    assert found == pytest.approx([3 / 5, NAN, NAN], nan_ok=True)
    state = prior.observe(state, torch.tensor([1]), torch.tensor([0.0]), np.random.default_rng(0))
    assert prior.predict(state, torch.tensor([1])).tolist() == pytest.approx([(1 + 1) / (2.5 + 2)])
    with pytest.raises(ConfigError, match="they are not on this machine"):
        Nearest(4, "prompt", 2).start(make_run(dataset=None))


# ---- parameters


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"reward_low": 1.0, "reward_high": 1.0}, "the first must be lower"),
        ({"k_init": 5, "k_max": 4}, "`k_max` is 4, below `k_init` = 5"),
        ({"k_max": 100}, "takes 64 or more rounds"),
        ({"cost": -1}, "`cost` is -1"),
        ({"prior": "constant"}, "needs `prior_value`"),
        ({"prior_value": 0.5}, "`prior_value` has no effect"),
        ({"prior": "column"}, "needs `prior_column`"),
        ({"prior": "beta"}, "`prior` is 'beta'"),
        ({"prior": "no.such:thing"}, "`prior`"),
        ({"prior_decay": 1.5}, "`prior_decay` is 1.5"),
    ],
)
def test_parameters_that_cannot_be(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_params(V05.Params, params, "v0_5")
    assert text in str(caught.value)


def test_the_group_size_must_hold_the_first_rollouts(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ConfigError, match="room for 3 rollouts per prompt, and `k_init` is 4"):
        v0_5_stack(group_size=3)
    v0_5_stack(group_size=5)
    assert not caplog.records
    v0_5_stack(group_size=4)
    assert "there is no room for extra rollouts" in caplog.text


def test_a_prior_by_name_of_a_function() -> None:
    params = build_params(V05.Params, {"prior": "operator:add"}, "v0_5")
    assert callable(params.prior)
