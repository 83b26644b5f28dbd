"""Sol-RL (arXiv 2604.06916): choice, advantages and objective against plain loops, golden numbers, reductions."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core import denoising
from rl_plugins.core.denoising import Denoise, Sample, SamplePrompt
from rl_plugins.core.errors import ConfigError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.groups import Groups
from rl_plugins.core.rollouts import Rollouts
from rl_plugins.diffusion.nft import decay, nft_loss, noisy, optimality
from rl_plugins.methods.sol_rl.choice import places
from rl_plugins.runtime.decide import decide
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_plan, make_rollouts, make_run, start_stack
from rl_plugins.testing.denoiser import FlowEngine, GaussianFlow, make_sample_prompt, run_sample_program

GOLDEN = Golden("sol_rl")
NAN = math.nan
MODES = ("best_worst", "mean_deviation", "extremes_random", "random")


def started(name: str, **params: Any) -> MethodStack:
    stack = build_stack(name, {name: params})
    return start_stack(*stack.methods, run=make_run(group_size=4))


def call(stack: MethodStack, hook: str, *args: Any) -> Any:
    """A hook of the only method, with what it logs in `logged`."""
    (method,) = stack.methods
    stack.metrics.take()
    return stack.call(hook, method, *args)


def logged(stack: MethodStack) -> dict[str, float]:
    return {k.partition("/")[2]: v for k, v in combine([stack.metrics.take()]).items()}


def one_group(size: int) -> Groups:
    return Groups(torch.zeros(size, dtype=torch.int64), count=1)


def chosen(rewards: list[float], k: int, mode: Any = "best_worst", noise: list[float] | None = None) -> list[int]:
    """Rows of one group that stay, in their order."""
    x = torch.tensor(rewards, dtype=torch.float64)
    draw = torch.linspace(0, 0.9, len(x)).double() if noise is None else torch.tensor(noise, dtype=torch.float64)
    place = places(x, one_group(len(x)), torch.tensor([k]), mode, draw)
    rows = (place >= 0).nonzero()[:, 0]
    order = torch.argsort(place[rows])
    assert place[rows][order].tolist() == list(range(len(rows)))
    return rows[order].tolist()


# ---- golden numbers


@GOLDEN.kind("rewards")
def check_rewards(case: Case) -> None:
    """The choice of samples, or the advantages where prompts are named."""
    p = case.params
    if "prompts" in case.inputs:
        check_advantages(case)
        return
    p.must_be("mode", "best_worst", "mean_deviation")
    assert chosen(case.inputs["rewards"], p["target_count"], p["mode"]) == case.expected["indices"]


def check_advantages(case: Case) -> None:
    p = case.params
    names = case.inputs["prompts"]
    group = torch.tensor([sorted(set(names)).index(name) for name in names])
    rollouts = make_rollouts(torch.tensor(case.inputs["rewards"], dtype=torch.float64))
    rollouts = rollouts.replace(group=group, rollout=torch.arange(len(group)))
    stack = started("sol_rl_advantages", deviation="batch" if p["global_std"] else "group", eps=p["eps"])
    found = call(stack, "advantages", rollouts)
    torch.testing.assert_close(found, torch.tensor(case.expected["advantages"]).double(), rtol=2e-6, atol=1e-9)


@GOLDEN.kind("advantages")
def check_objective(case: Case) -> None:
    p, given_ = case.params, case.inputs
    advantages = torch.tensor(given_["advantages"], dtype=torch.float64)
    if "x0" not in given_:
        found = optimality(advantages, p["adv_clip_max"])
        torch.testing.assert_close(found, torch.tensor(case.expected["r"]).double(), rtol=1e-6, atol=1e-9)
        return
    names = ("x0", "noise", "t", "old_pred", "new_pred", "ref_pred")
    x0, noise, t, old, new, ref = (torch.tensor(given_[k], dtype=torch.float64) for k in names)
    loss = nft_loss(x0, noisy(x0, noise, t), t, new, old, ref, advantages, p["beta"], p["adv_clip_max"])
    total = (loss.policy + p["kl_beta"] * loss.kl).mean()
    assert total.item() == pytest.approx(case.expected["loss"], rel=1e-6)


@GOLDEN.kind("steps", "step")
def check_decay(case: Case) -> None:
    """Values by decay type: in `expected`, or in the one dictionary that it holds."""
    steps = case.inputs["steps" if "steps" in case.inputs else "step"]
    by_type: Any = case.expected
    if not any(re.search(r"\d", name) for name in by_type):
        (name,) = by_type
        by_type = by_type[name]
    for name in by_type:
        if number := re.search(r"\d+", name):
            found = [decay(s, int(number[0])) for s in ([steps] if isinstance(steps, int) else steps)]
            assert found == pytest.approx(torch.tensor(by_type[name]).double().flatten().tolist(), abs=1e-7)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- the choice


def choice_by_loop(rewards: list[float], k: int, mode: str, noise: list[float]) -> list[int]:
    known = [i for i, r in enumerate(rewards) if not math.isnan(r)]
    kept: list[int] = []
    if mode == "best_worst":
        falling = sorted(known, key=lambda i: -rewards[i])  # stable
        k_known = min(k, len(known))
        best = k_known // 2
        kept = falling[:best] + falling[::-1][: k_known - best]
    elif known:
        mean = sum(rewards[i] for i in known) / len(known)
        if mode == "mean_deviation":
            kept = sorted(known, key=lambda i: -abs(rewards[i] - mean))[:k]
        elif mode == "random":
            kept = sorted(known, key=lambda i: -noise[i])[:k]
        else:
            first = sorted({min(known, key=lambda i: -rewards[i]), min(known, key=lambda i: rewards[i])})
            rest = sorted(set(known) - set(first), key=lambda i: -noise[i])
            kept = (first + rest)[:k]
    missing = [i for i in range(len(rewards)) if i not in known]
    return kept + missing[: k - len(kept)]


REWARD = st.one_of(st.just(NAN), st.integers(-2, 2).map(float), st.sampled_from([0.125, 0.5, 3.25]))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.lists(REWARD, min_size=1, max_size=9), min_size=1, max_size=5),
    st.data(),
    st.sampled_from(MODES),
)
def test_the_choice_equals_a_loop_on_ragged_and_interleaved_groups(
    pools: list[list[float]], data: Any, mode: Any
) -> None:
    ids = [g for g, pool in enumerate(pools) for _ in pool]
    order = data.draw(st.permutations(range(len(ids))))
    k = data.draw(st.lists(st.integers(0, 10), min_size=len(pools), max_size=len(pools)))
    flat = [r for pool in pools for r in pool]
    noise = [(7 * i % len(flat)) / len(flat) if len(flat) % 7 else i / len(flat) for i in range(len(flat))]
    group, reward, draw = (torch.tensor([x[i] for i in order]) for x in (ids, flat, noise))
    found = places(reward.double(), Groups(group), torch.tensor(k), mode, draw.double())
    for g in range(len(pools)):
        rows = (group == g).nonzero()[:, 0].tolist()
        expected = choice_by_loop([reward[i].item() for i in rows], k[g], mode, [draw[i].item() for i in rows])
        of_group = found[group == g].tolist()
        assert [of_group.index(i) for i in range(len(expected))] == expected
        assert sum(p >= 0 for p in of_group) == min(k[g], len(rows))


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_equal_rewards_keep_k_different_ones(value: float) -> None:
    assert chosen([value] * 8, 4) == [0, 1, 7, 6]
    assert chosen([value] * 3, 9) == [0, 2, 1]


def test_an_odd_number_keeps_one_more_of_the_worst() -> None:
    assert chosen([5, 1, 4, 2, 3], 3) == [0, 1, 3]
    assert chosen([5, 1, 4, 2, 3], 1) == [1]


def test_rollouts_without_a_reward_leave_first_and_fill_what_is_empty() -> None:
    assert chosen([NAN, 3, 1, NAN, 2], 2) == [1, 2]
    assert chosen([NAN, 3, 1, NAN, 2], 4) == [1, 2, 4, 0]
    assert chosen([NAN, NAN, NAN], 2) == [0, 1]


# ---- as a method


def pool(rewards: list[list[float]], **changes: Any) -> Rollouts:
    x = torch.tensor(rewards, dtype=torch.float64)
    return make_rollouts(x.flatten(), group_size=x.shape[1], **changes)


def test_the_plan_asks_for_a_pool_and_the_choice_leaves_what_was_planned() -> None:
    stack = started("sol_rl_select", oversample=2.5)
    plan = call(stack, "plan", make_plan(prompts=2, group_size=2))
    assert [(r.n, r.spare) for r in plan.rows] == [(2, 3), (2, 3)]
    rewards = [[0.0, 1.0, NAN, 2.0, 0.5], [1.0, 1.0, 1.0, 1.0, 0.0]]
    keep = call(stack, "select", pool(rewards))
    assert keep.view(2, 5).tolist() == [[True, False, False, True, False], [True, False, False, False, True]]
    found = logged(stack)
    assert found["left"] == 6
    assert found["pool_reward"] == pytest.approx((0 + 1 + 2 + 0.5 + 4) / 9)
    assert found["kept_reward"] == pytest.approx((2 + 0 + 1 + 0) / 4)
    assert found["kept_std"] == pytest.approx((1.0 + 0.5) / 2)
    assert stack.methods[0].state == {}


def test_spare_rollouts_of_other_methods_stay_for_them() -> None:
    stack = start_stack(*build_stack(["mc_grpo", "sol_rl_select"]).methods, run=make_run(group_size=2))
    select = stack.methods[1]
    plan = stack.methods[0].plan(make_plan(prompts=1, group_size=2))
    plan = stack.call("plan", select, plan)
    assert [(r.n, r.spare) for r in plan.rows] == [(2, 7)]
    keep = stack.call("select", select, pool([[float(i) for i in range(9)]]))
    assert keep.tolist() == [True, True, *[False] * 6, True]
    # and of a method that is named after it
    plan = stack.call("plan", select, make_plan(prompts=1, group_size=2))
    keep = stack.call("select", select, pool([[float(i) for i in range(9)]]))
    assert keep.sum() == 3


def test_a_rollout_that_left_earlier_is_no_candidate() -> None:
    stack = started("sol_rl_select", oversample=2)
    call(stack, "plan", make_plan(prompts=1, group_size=2))
    rollouts = pool([[9.0, 1.0, 2.0, 3.0]])
    rollouts = rollouts.replace(kept=torch.tensor([False, True, True, True]))
    assert call(stack, "select", rollouts).tolist() == [False, True, False, True]


def test_rows_of_one_rollout_stay_together() -> None:
    """Two rows of each of four rollouts; their mean counts."""
    stack = started("sol_rl_select", oversample=2)
    call(stack, "plan", make_plan(prompts=1, group_size=2))
    rollouts = pool([[0.0, 4.0, 3.0, 3.5, 9.0, 1.0, 1.0, 1.0]])
    rollouts = rollouts.replace(rollout=torch.arange(8) // 2, index=torch.arange(8) % 2)
    assert call(stack, "select", rollouts).view(4, 2).any(1).tolist() == [False, False, True, True]
    assert call(stack, "select", rollouts).view(4, 2).all(1).tolist() == [False, False, True, True]


def test_a_group_that_was_not_planned_is_cut_by_the_ratio() -> None:
    assert call(started("sol_rl_select", oversample=2), "select", pool([[0.0, 1.0, 2.0, 3.0]])).sum() == 2


@pytest.mark.parametrize("mode", MODES)
def test_a_pool_of_the_group_size_changes_nothing(mode: str) -> None:
    stack = start_stack(*build_stack("sol_rl_select", {"sol_rl_select": {"oversample": 1, "mode": mode}}).methods)
    plan = make_plan(prompts=2, group_size=3)
    assert stack.call("plan", stack.methods[0], plan) == plan
    rollouts = pool([[0.0, 1.0, NAN], [2.0, 2.0, 2.0]])
    decision = decide(stack, rollouts, None, None, grpo_advantages, 6)
    assert bool(decision.trained.all())
    assert torch.equal(decision.row_advantages, grpo_advantages(rollouts))


def test_the_driver_trains_the_extremes_with_a_full_batch() -> None:
    stack = build_stack(["sol_rl_select", "sol_rl_advantages"])
    stack = start_stack(*stack.methods, run=make_run(group_size=2))
    stack.call("plan", stack.methods[0], make_plan(prompts=2, group_size=2))
    rewards = [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0], [1.0, 1.0, 1.0, 1.0, 1.0, 1.0, NAN, NAN]]
    decision = decide(stack, pool(rewards), None, None, grpo_advantages, 4)
    assert decision.trained.nonzero()[:, 0].tolist() == [0, 7, 8, 13]
    sigma = torch.tensor([0.0, 8.0, 1.0, 1.0]).double().std(correction=0) + 1e-4
    expected = torch.zeros(16, dtype=torch.float64)
    expected[0], expected[7] = -4 / sigma, 4 / sigma
    torch.testing.assert_close(decision.row_advantages, expected)


@pytest.mark.parametrize("mode", ["random", "extremes_random"])
def test_chance_depends_on_the_seed_and_not_on_the_order_of_rows(mode: str) -> None:
    rewards = pool([[float(i) for i in range(12)]])
    kept = []
    for seed in (0, 0, 1, 2):
        stack = start_stack(*build_stack("sol_rl_select", {"sol_rl_select": {"mode": mode}}, seed).methods, seed=seed)
        kept.append(stack.call("select", stack.methods[0], rewards).nonzero()[:, 0].tolist())
    assert kept[0] == kept[1] and len({tuple(k) for k in kept}) > 1
    assert all(len(k) == 3 for k in kept)
    if mode == "extremes_random":
        assert all({0, 11} <= set(k) for k in kept)


@pytest.mark.parametrize("value", [0.99, math.inf, -1])
def test_a_pool_smaller_than_the_group_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="oversample"):
        started("sol_rl_select", oversample=value)


# ---- two stages on a known flow


def explored(prompt: SamplePrompt, engine: FlowEngine, **params: Any) -> tuple[list[Sample], dict[str, float]]:
    (method,) = build_stack("sol_rl_explore", {"sol_rl_explore": params}).methods
    logged: dict[str, float] = {}
    return run_sample_program(method, prompt, engine, logged), logged


def mean_reward(x: torch.Tensor, columns: Any) -> float:
    return float(x.mean())


@pytest.mark.parametrize("stochastic", [True, False])
def test_the_best_and_worst_seeds_are_made_again_and_nothing_else_is_returned(stochastic: bool) -> None:
    prompt = make_sample_prompt(n=5, steps=10, has_cheap=True, stochastic=stochastic)
    engine = FlowEngine(GaussianFlow(1.0), mean_reward, cheap=GaussianFlow(0.3, 0.7))
    samples, logged = explored(prompt, engine, pool=2.4, steps=4)

    seeds = prompt.seeds(12)
    plain = FlowEngine(GaussianFlow(1.0), mean_reward, cheap=GaussianFlow(0.3, 0.7))
    asked = [(prompt, Denoise(prompt.start(s, 4), stochastic=False, model="cheap")) for s in seeds]
    cheap = [float(x.latent.mean()) for (x,) in plain.denoise(asked)]
    falling = sorted(range(12), key=lambda i: -cheap[i])
    expected = [seeds[i] for i in (*falling[:2], *falling[::-1][:3])]
    assert [x.seed for x in samples] == expected

    again = plain.denoise([(prompt, Denoise(prompt.start(s), stochastic=stochastic)) for s in expected])
    for x, (same,) in zip(samples, again, strict=True):
        assert torch.equal(x.latent, same.latent) and x.total == 10 and len(x.trained) == 10 * stochastic
        assert {t.model for t in x.transitions} == {"policy"}
        assert x.rewards == {"reward": float(x.latent.mean())}
    assert engine.passes == {"cheap": 12 * 4, "policy": 5 * 10} and len(engine.scores) == 12 + 5

    exact, kept = [float(x.latent.mean()) for x in samples], [cheap[seeds.index(s)] for s in expected]
    assert logged["sol_rl_explore/explored_reward"] == pytest.approx(sum(cheap) / 12)
    assert logged["sol_rl_explore/kept_cheap_reward"] == pytest.approx(sum(kept) / 5)
    assert logged["sol_rl_explore/kept_exact_reward"] == pytest.approx(sum(exact) / 5)
    assert logged["sol_rl_explore/gap"] == pytest.approx(sum(abs(a - b) for a, b in zip(exact, kept, strict=True)) / 5)
    ranks = [[sorted(v).index(x) for x in v] for v in (exact, kept)]
    spearman = 1 - 6 * sum((a - b) ** 2 for a, b in zip(*ranks, strict=True)) / (5 * 24)
    assert logged["sol_rl_explore/rank_correlation"] == pytest.approx(spearman)


@pytest.mark.parametrize("noise", [True, False])
def test_the_same_model_and_steps_make_the_same_samples_twice(noise: bool) -> None:
    prompt = make_sample_prompt(n=4, steps=6, stochastic=noise)
    samples, logged = explored(prompt, FlowEngine(reward=mean_reward), model="policy", steps=6, noise=noise)
    assert logged["sol_rl_explore/gap"] == 0 and logged["sol_rl_explore/rank_correlation"] == pytest.approx(1)
    rewards = [float(x.latent.mean()) for x in samples]
    assert rewards[:2] == sorted(rewards, reverse=True)[:2] and rewards[2:] == sorted(rewards)[:2]


def test_a_pool_of_the_samples_alone_explores_nothing() -> None:
    prompt = make_sample_prompt(n=3, steps=5, has_cheap=True)
    engine = FlowEngine(reward=mean_reward, cheap=GaussianFlow())
    samples, logged = explored(prompt, engine, pool=1)
    assert [x.seed for x in samples] == prompt.seeds(3)
    assert engine.passes == {"cheap": 0, "policy": 15} and not logged


def test_explored_samples_without_a_reward_are_the_last_choice() -> None:
    """Only what the cheap copy makes is unscorable; two of eight have a reward."""
    prompt = make_sample_prompt(n=4, steps=5, has_cheap=True)
    seen: list[float] = []

    def reward(x: torch.Tensor, columns: Any) -> float | None:
        seen.append(float(x.mean()))
        return None if len(seen) <= 6 else seen[-1]

    samples, logged = explored(prompt, FlowEngine(reward=reward, cheap=GaussianFlow()), pool=2)
    seeds = prompt.seeds(8)
    high, low = (6, 7) if seen[6] >= seen[7] else (7, 6)
    assert [x.seed for x in samples] == [seeds[i] for i in (high, low, 0, 1)]
    assert logged["sol_rl_explore/explored_reward"] == pytest.approx((seen[6] + seen[7]) / 2)


def test_seeds_that_collide_are_drawn_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of nine seeds there are, eight are explored: each once."""
    monkeypatch.setattr(denoising, "SEEDS", 9)
    prompt = make_sample_prompt(n=4, steps=3, has_cheap=True)
    engine = FlowEngine(reward=mean_reward, cheap=GaussianFlow())
    samples, _ = explored(prompt, engine, pool=2, steps=2)
    tried = [r.sample.seed for r in engine.requests if r.model == "cheap"]
    assert len(set(tried)) == 8 and len({x.seed for x in samples}) == 4


def test_more_steps_than_a_sample_has_are_refused() -> None:
    (method,) = build_stack("sol_rl_explore", {"sol_rl_explore": {"steps": 11}}).methods
    with pytest.raises(ConfigError, match="explored in 11 steps, and made in 10. Lower `steps`"):
        method.check(make_run(host="diffusion", max_completion_length=10))


# ---- advantages


def advantages_by_loop(groups: list[list[float]], deviation: str, eps: float) -> list[float]:
    def std(values: list[float]) -> float:
        mean = sum(values) / len(values)
        return math.sqrt(sum((v - mean) ** 2 for v in values) / len(values))

    everything = [r for of in groups for r in of if not math.isnan(r)]
    out = []
    for of in groups:
        known = [r for r in of if not math.isnan(r)]
        sigma = std(everything if deviation == "batch" else known) if known else 0.0
        mean = sum(known) / len(known) if known else 0.0
        equal = len(set(known)) <= 1
        out += [0.0 if math.isnan(r) or equal else (r - mean) / (sigma + eps) for r in of]
    return out


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(REWARD, min_size=1, max_size=6), min_size=1, max_size=5), st.sampled_from(["batch", "group"]))
def test_advantages_equal_a_loop(groups: list[list[float]], deviation: str) -> None:
    flat = torch.tensor([r for of in groups for r in of], dtype=torch.float64)
    group = torch.tensor([g for g, of in enumerate(groups) for _ in of])
    rollouts = make_rollouts(flat).replace(group=group, rollout=torch.arange(len(group)))
    found = call(started("sol_rl_advantages", deviation=deviation), "advantages", rollouts)
    expected = torch.tensor(advantages_by_loop(groups, deviation, 1e-4), dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    sums = Groups(group).sum(found)
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-7)


def test_one_prompt_has_one_deviation() -> None:
    rollouts = pool([[0.25, 1.0, 0.5, 4.0]])
    found = [call(started("sol_rl_advantages", deviation=d), "advantages", rollouts) for d in ("batch", "group")]
    assert torch.equal(*found)


def test_rows_of_a_rollout_share_its_advantage_and_count_once() -> None:
    rollouts = pool([[1.0, 1.0, 1.0, 0.0]]).replace(
        rollout=torch.tensor([0, 0, 1, 2]), index=torch.tensor([0, 1, 0, 0])
    )
    found = call(started("sol_rl_advantages"), "advantages", rollouts)
    sigma = math.sqrt(2 / 9) + 1e-4
    torch.testing.assert_close(found, torch.tensor([1 / 3, 1 / 3, 1 / 3, -2 / 3]).double() / sigma)


# ---- the objective


def nft_by_loop(
    x0: list[float],
    noise: list[float],
    t: float,
    v: list[float],
    old: list[float],
    ref: list[float],
    a: float,
    b: float,
) -> tuple[float, float]:
    c, n = 5.0, len(x0)
    r = min(max(min(max(a, -c), c) / c / 2 + 0.5, 0.0), 1.0)
    parts = []
    for sign in (1, -1):
        change = []
        for i in range(n):
            xt = (1 - t) * x0[i] + t * noise[i]
            v_sign = b * v[i] + (1 - b) * old[i] if sign > 0 else (1 + b) * old[i] - b * v[i]
            change.append(xt - t * v_sign - x0[i])
        w = max(sum(map(abs, change)) / n, 1e-5)
        parts.append(sum(x * x / w for x in change) / n)
    policy = c * (r * parts[0] + (1 - r) * parts[1]) / b
    return policy, sum((x - y) ** 2 for x, y in zip(v, ref, strict=True)) / n


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([0.1, 0.5, 1.0]))
def test_the_loss_equals_a_loop(seed: int, beta: float) -> None:
    torch.manual_seed(seed)
    x0, noise, v, old, ref = torch.randn(5, 3, 2, 4, dtype=torch.float64)
    t, a = torch.rand(3).double(), 4 * torch.randn(3).double()
    loss = nft_loss(x0, noisy(x0, noise, t), t, v, old, ref, a, beta)
    for i in range(3):
        flat = [x[i].flatten().tolist() for x in (x0, noise, v, old, ref)]
        policy, kl = nft_by_loop(flat[0], flat[1], t[i].item(), *flat[2:], a[i].item(), beta)
        assert loss.policy[i].item() == pytest.approx(policy, rel=1e-9)
        assert loss.kl[i].item() == pytest.approx(kl, rel=1e-9)


def test_good_samples_pull_and_bad_ones_push() -> None:
    """At v = v_old the gradient is that of flow matching for r = 1, and the opposite for r = 0; at r = 1/2 it is 0."""
    torch.manual_seed(0)
    x0, noise = torch.randn(2, 1, 6, dtype=torch.float64)
    t = torch.tensor([0.5]).double()
    xt, old = noisy(x0, noise, t), torch.randn(1, 6).double()
    grads = []
    for a in (5.0, 0.0, -5.0):
        v = old.clone().requires_grad_()
        nft_loss(x0, xt, t, v, old, old, torch.tensor([a]).double()).policy.sum().backward()
        grads.append(v.grad)
    assert torch.equal(grads[0], -grads[2]) and not grads[1].any() and grads[0].abs().min() > 0
    towards = (noise - x0 - old).flatten()  # flow matching pulls v to noise - x0
    assert torch.nn.functional.cosine_similarity(-grads[0].flatten(), towards, dim=0) == pytest.approx(1)


def test_no_gradient_reaches_the_old_policy_or_the_reference() -> None:
    x = [torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    x0 = torch.randn(2, 3).double()
    loss = nft_loss(x0, x0 + 1, torch.tensor([0.3, 0.9]).double(), *x, torch.tensor([1.0, -1.0]).double())
    (loss.policy + loss.kl).sum().backward()
    assert x[0].grad is not None and x[1].grad is None and x[2].grad is None


def test_the_old_policy_decays_as_named() -> None:
    assert [decay(s, 0) for s in (0, 50, 5000)] == [0, 0, 0]
    assert [decay(s, 1) for s in (0, 100, 500, 5000)] == pytest.approx([0, 0.1, 0.5, 0.5])
    assert [decay(s, 2) for s in (0, 75, 175, 5000)] == pytest.approx([0, 0, 0.75, 0.999])
    with pytest.raises(ConfigError, match=r"decay type of the old policy is 3\. It must be one of \(0, 1, 2\)"):
        decay(1, 3)
