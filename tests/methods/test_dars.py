"""DARS (arXiv 2508.13755): the schedules, the sharing of room, the filter, the options of hosts, all through the
driver."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from golden_cases import Case, Golden
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.method import SameAs
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Completion, GroupSoFar, Plan, PlanRow, Rollouts
from rl_plugins.methods.dars import Dars, helping, served
from rl_plugins.methods.dars_b import DARS_B
from rl_plugins.methods.dars_breadth import DarsBreadth
from rl_plugins.methods.mc_grpo import McGrpo
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.preflight import preflight
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_plan, make_rollouts, make_run, one_step, start_stack

GOLDEN = Golden("dars")
NAN = math.nan


def dars_stack(group_size: int = 8, **params: Any) -> MethodStack:
    method = Dars(build_params(Dars.Params, params, "dars"))
    return start_stack(method, run=make_run(group_size=group_size))


def generated(stack: MethodStack, rewards: Sequence[Sequence[float]], group_size: int) -> tuple[Rollouts, Rounds]:
    """A batch, round by round; `rewards[prompt]` are those of its rollouts in order, the last of them again and
    again."""
    prompts = len(rewards)
    plan = first_plan(stack, range(prompts), group_size, prompts * group_size, 64)
    rounds = Rounds(stack, plan.rows, group_size, prompts * group_size, 64)
    while True:
        group = [row.group for row in rounds.rows for _ in range(row.n + row.spare)]
        number = [group[:i].count(g) for i, g in enumerate(group)]
        values = [float(rewards[g][min(k, len(rewards[g]) - 1)]) for g, k in zip(group, number, strict=True)]
        rollouts = make_rollouts(values, group)
        if not rounds.more(rollouts.group, rollouts.reward):
            return rollouts, rounds


def sizes(rollouts: Rollouts) -> list[int]:
    return torch.bincount(rollouts.group).tolist()


def right(*numbers: int, of: int = 8, then: float = 0.0) -> list[list[float]]:
    """Prompts with so many right first rollouts, and later ones like `then`."""
    return [[1.0] * n + [0.0] * (of - n) + [then] for n in numbers]


def logged(stack: MethodStack) -> dict[str, float]:
    return combine([stack.metrics.take()])


# ---- schedules


@GOLDEN.kind("acc")
def check_schedule(case: Case) -> None:
    p = case.params
    first, most = p["N"], p["N_max"]
    found = [helping(u, p["schedule"].lower(), first, most, p["use_std"]) for u in case.inputs["acc"]]
    wanted = case.expected["delta_n"]
    assert found == (wanted if most >= first else [max(0, n) for n in wanted])


@GOLDEN.kind("rewards")
def check_advantages(case: Case) -> None:
    """The host's estimator, as the options of the method set it, on combined groups."""
    method = Dars(Dars.Params(use_std=case.params["use_std"]))
    names = list(dict.fromkeys(case.inputs["group_ids"]))
    group = [names.index(name) for name in case.inputs["group_ids"]]
    rollouts = make_rollouts(case.inputs["rewards"], group, lengths=case.inputs["response_lengths"])
    scale = method.host_options["trl"]["scale_rewards"]
    found = grpo_advantages(rollouts, scale, case.params["epsilon"])
    assert found.tolist() == pytest.approx(case.expected["sequence_advantage"], abs=1e-6)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


def test_the_very_expressions_are_rounded() -> None:
    """Rounding lifts an exact integer by one where N is no power of two, as in the authors' code."""
    assert helping(3 / 8, "et", 8, 32) == 1  # ceil(0.533)
    assert helping(0.0, "hw", 6, 64) == 31  # the closed form says 30
    assert helping(0.0, "et", 6, 3) == 0  # never negative
    assert helping(NAN, "hw", 8, 64) == 0
    assert helping(1e-6, "et", 8, 320) == helping(0.0, "et", 8, 320) == helping(0.5 / 8, "et", 8, 320) == 27
    assert helping(0.4999, "et", 8, 32) == 1 and helping(0.5, "hw", 8, 32) == 0


def loop(u: float, schedule: str, n: int, most: int, use_std: bool) -> int:
    """The authors' functions, by their branches."""
    if u <= 1e-6:
        u = 0.5 / n
    if u >= 0.5:
        return 0
    if schedule == "et":
        extra = (
            (n - n * (2 * math.sqrt(u * (1 - u)))) / (2 * math.sqrt(u * (1 - u)))
            if use_std
            else (0.5 * n - n * (2 * u * (1 - u))) / (2 * u * (1 - u))
        )
    else:
        extra = (
            (2 * (1 - u) * n - n * (2 * math.sqrt(u * (1 - u)))) / (2 * math.sqrt(u * (1 - u)))
            if use_std
            else (2 * (1 - u) * (0.5 * n) - n * (2 * u * (1 - u))) / (2 * u * (1 - u))
        )
    return min(math.ceil(extra), most - n)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(2, 32),
    extra=st.integers(0, 64),
    use_std=st.booleans(),
    schedule=st.sampled_from(["et", "hw"]),
    share=st.floats(0, 1),
)
def test_properties_of_the_schedules(n: int, extra: int, use_std: bool, schedule: Any, share: float) -> None:
    most = n + extra
    of = lambda u, schedule=schedule: helping(u, schedule, n, most, use_std)
    assert of(share) == loop(share, schedule, n, most, use_std)
    rates = [k / n for k in range(1, n + 1)]
    asked = [of(u) for u in rates]
    assert asked == sorted(asked, reverse=True) and all(0 <= a <= extra for a in asked)
    assert all(a == 0 for u, a in zip(rates, asked, strict=True) if u >= 0.5)
    assert all(of(u, "hw") >= of(u, "et") for u in rates)
    u = max(0.001, share / 2)
    each = 2 * math.sqrt(u * (1 - u)) if use_std else 2 * u * (1 - u)
    peak = n if use_std else n / 2
    total = (helping(u, schedule, n, 10**9, use_std) + n) * each  # of |advantage|, before the cap
    wanted = peak * (1 if schedule == "et" else 2 * (1 - u))
    if u < 0.5:
        assert wanted - 1e-9 <= total <= wanted + each + 1e-9


def test_schedules_count_what_advantages_are() -> None:
    """N S is the expected total of |advantage| of N rollouts, exact for u of the sample."""
    for k in range(1, 8):
        rollouts = make_rollouts(right(k)[0][:8], [0] * 8)
        u = k / 8
        assert float(grpo_advantages(rollouts, "none").abs().sum()) == pytest.approx(8 * 2 * u * (1 - u))
        population = grpo_advantages(rollouts, "group", 0.0) * math.sqrt(8 / 7)
        assert float(population.abs().sum()) == pytest.approx(8 * 2 * math.sqrt(u * (1 - u)))


@settings(max_examples=60, deadline=None)
@given(asked=st.lists(st.integers(0, 60), max_size=12), room=st.integers(0, 200))
def test_what_does_not_fit_is_shared_in_proportion(asked: list[int], room: int) -> None:
    found = served(asked, room)
    assert sum(found) == min(room, sum(asked)) and all(0 <= f <= a for f, a in zip(found, asked, strict=True))
    if sum(asked) > room:
        shares = [a * room / sum(asked) for a in asked]
        assert all(abs(f - s) < 1 for f, s in zip(found, shares, strict=True))
        lifted = [s % 1 for f, s in zip(found, shares, strict=True) if f > s]
        others = [s % 1 for f, s in zip(found, shares, strict=True) if f < s]
        assert not lifted or not others or min(lifted) >= max(others) - 1e-9
    assert served([24, 11, 3, 1], 20) == [12, 6, 2, 0]  # 12.3, 5.6, 1.5, 0.5: of equal remainders the first


# ---- rounds


def test_the_first_round_is_spare_and_the_second_helps() -> None:
    """Room for 16 each, 64 in all. Of 8: none right asks for 24, 1 right 11, 3 right 1, all right leaves."""
    stack = dars_stack(16)
    rollouts, rounds = generated(stack, right(0, 1, 3, 8, then=1.0), 16)
    first, second = rounds.rows[:4], rounds.rows[4:]
    assert [(r.n, r.spare) for r in first] == [(0, 8)] * 4
    assert [(r.group, r.n, r.spare) for r in second] == [(0, 24, 0), (1, 11, 0), (2, 1, 0)]
    assert rounds.number == 2  # the third asks for nothing
    assert sizes(rollouts) == [32, 19, 9, 8]
    told = logged(stack)
    assert told["dars/asked"] == 36 and told["dars/served"] == 1
    decision = one_step(stack, rollouts, budget=64)
    assert decision.stays.tolist() == [g < 3 for g in rollouts.group.tolist()]
    told = logged(stack)
    assert told["dars/rescued"] == 1 and told["dars/left"] == 0.25


def test_helpings_that_do_not_fit_are_scaled_down_and_the_share_is_logged() -> None:
    """A batch of 40 rows: 24 are the first rollouts of those that may be trained, 16 are left for 36."""
    stack = dars_stack(10)
    rollouts, rounds = generated(stack, right(0, 1, 3, 8), 10)
    assert [(r.group, r.n) for r in rounds.rows[4:]] == [(g, n) for g, n in enumerate(served([24, 11, 1], 16)) if n]
    assert sizes(rollouts) == [8 + 11, 8 + 5, 8, 8] and logged(stack)["dars/served"] == 16 / 36
    one_step(stack, rollouts, budget=40)


def test_prompts_that_leave_free_their_room() -> None:
    """A group size of n_first: all the room there is comes from prompts that are always right."""
    stack = dars_stack(8)
    rollouts, _ = generated(stack, right(0, 8, 8, 4), 8)
    assert sizes(rollouts) == [24, 8, 8, 8] and logged(stack)["dars/served"] == 16 / 24
    stack = dars_stack(8, n_max=8 + 1)  # one that cannot be helped further keeps its own
    rollouts, _ = generated(stack, right(0, 1, 8, 4), 8)
    assert sizes(rollouts) == [9, 9, 8, 8]
    stack = dars_stack(8)
    rollouts, _ = generated(stack, right(0, 4, 5, 4), 8)
    assert sizes(rollouts) == [8] * 4 and logged(stack)["dars/served"] == 0


def test_no_batch_is_ever_too_large() -> None:
    @settings(max_examples=40, deadline=None)
    @given(data=st.data())
    def holds(data: st.DataObject) -> None:
        first = data.draw(st.integers(1, 6))
        size, most = first + data.draw(st.integers(0, 6)), first + data.draw(st.integers(0, 20))
        outcome = st.sampled_from([0.0, 1.0, NAN])
        rewards = data.draw(st.lists(st.lists(outcome, min_size=most + 1, max_size=most + 1), min_size=1, max_size=6))
        params = {
            "n_first": first,
            "n_max": most,
            "schedule": data.draw(st.sampled_from(["et", "hw"])),
            "use_std": data.draw(st.booleans()),
            "upper": data.draw(st.sampled_from([0.25, 0.5, 1.0])),
        }
        stack = dars_stack(size, **params)
        rollouts, _ = generated(stack, rewards, size)
        budget = size * len(rewards)
        decision = one_step(stack, rollouts, budget=budget)  # refuses more rows than fit
        upper = params["upper"]
        for g, own in enumerate(rewards):
            count = sizes(rollouts)[g]
            known = [r for r in own[:first] if r == r]
            u = sum(known) / len(known) if known else NAN
            assert first <= count <= first + helping(u, params["schedule"], first, most, params["use_std"])
            made = [r for r in own[:count] if r == r]
            mean = sum(made) / len(made) if made else 0.0
            stays = {bool(s) for s in decision.stays[rollouts.group == g]}
            assert stays == ({0 < mean < upper} if not all(r != r for w in rewards for r in w) else {False})

    holds()


def test_n_max_of_n_first_is_grpo_with_a_filter() -> None:
    stack = dars_stack(8, n_max=8)
    rollouts, rounds = generated(stack, right(0, 3, 8, 5), 8)
    assert sizes(rollouts) == [8] * 4 and rounds.number == 1
    decision = one_step(stack, rollouts, budget=32)
    plain = grpo_advantages(rollouts)
    assert torch.equal(decision.row_advantages, plain)  # of groups of one outcome they are 0
    assert decision.stays.tolist() == [g in (1, 3) for g in rollouts.group.tolist()]


def test_advantages_are_of_the_combined_group() -> None:
    stack = dars_stack(16)
    rollouts, _ = generated(stack, [[0.0] * 8 + [1.0] + [0.0], [1.0, 0.0] * 4], 16)
    decision = one_step(stack, rollouts, budget=32)
    assert sizes(rollouts) == [24, 8]  # 24 asked for, 16 fit
    rewards = rollouts.reward[:]
    for g in (0, 1):
        own = rollouts.group == g
        wanted = (rewards[own] - rewards[own].mean()) / (rewards[own].std() + 1e-4)  # the estimator of the test's host
        assert decision.row_advantages[own].tolist() == pytest.approx(wanted.tolist())
        assert float(decision.row_advantages[own].sum()) == pytest.approx(0, abs=1e-9)


def test_prompts_without_a_reward_and_nan() -> None:
    stack = dars_stack(16)
    rewards = [[NAN] * 9, [NAN] * 7 + [0.0], [NAN] * 6 + [0.0, 1.0, 0.0], [NAN, *[0.0] * 6, 1.0, 0.0]]
    rollouts, _ = generated(stack, rewards, 16)
    assert sizes(rollouts) == [8, 8 + 24, 8, 8 + helping(1 / 7, "et", 8, 32)]
    decision = one_step(stack, rollouts, budget=64)
    groups = rollouts.group.tolist()
    assert [any(s for s, g in zip(decision.stays, groups, strict=True) if g == k) for k in range(4)] == [0, 0, 1, 1]


def test_a_threshold_makes_graded_rewards_right_or_wrong() -> None:
    graded = [[0.2, 0.6, 0.2, 0.2, 0.2, 0.2, 0.2, 0.2, 0.1]]
    assert [sizes(generated(dars_stack(32, **p), graded, 32)[0])[0] for p in ({}, {"success_threshold": 0.6})] == [
        19
    ] * 2
    assert sizes(generated(dars_stack(32, success_threshold=0.61), graded, 32)[0]) == [32]
    assert sizes(generated(dars_stack(32, success_threshold=0.2), graded, 32)[0]) == [8]
    for threshold, stays in ((0.61, False), (0.6, True), (0.2, True), (0.1, False)):
        stack = dars_stack(32, success_threshold=threshold)
        rollouts = make_rollouts([*graded[0][:8], 0.1][threshold == 0.1 :], [0] * (9 - (threshold == 0.1)))
        assert bool(one_step(stack, rollouts, budget=32).stays.all()) == stays


def test_upper() -> None:
    stack = dars_stack(8, upper=0.75)
    rollouts, _ = generated(stack, right(5, 6, 7), 8)
    stays = one_step(stack, rollouts, budget=24).stays.reshape(3, 8).all(1).tolist()
    assert stays == [True, False, False]
    rollouts, _ = generated(dars_stack(8, upper=0.75), right(0, 6, 7), 8)
    assert sizes(rollouts) == [24, 8, 8]  # both leave their room to the first


def test_rollouts_of_several_rows_count_once() -> None:
    """Two rollouts, the right one of three rows: half of them are right, not three quarters."""
    stack = dars_stack(8, upper=0.6)
    rollouts = make_rollouts(
        [1.0, 1.0, 1.0, 0.0], [0] * 4, rollout=torch.tensor([0, 0, 0, 1]), index=torch.tensor([0, 1, 2, 0])
    )
    assert one_step(stack, rollouts).stays.all()


def test_the_filter_reads_what_the_plan_read() -> None:
    """A `rewards` hook of another method changes advantages, not which groups leave."""
    stack = dars_stack(8)
    rollouts = make_rollouts(right(8, 4)[0][:8] + right(8, 4)[1][:8], group_size=8)
    changed = rollouts.replace(reward=torch.arange(16) / 16.0)
    assert one_step(stack, changed, budget=16).stays.tolist() == [False] * 8 + [True] * 8


def test_given_completions_and_rows_of_others_are_left_as_they_are() -> None:
    stack = dars_stack(8, n_first=4)
    (method,) = stack.methods
    given = PlanRow(5, 9, 4, given=(Completion((1,)),) * 4)
    plan = make_plan(2, 8)
    first = method.plan(plan.replace(rows=(*plan.rows, given)))
    assert first.rows == (PlanRow(0, 0, 0, spare=4), PlanRow(1, 1, 0, spare=4), given)
    rounds = Rounds(stack, first.rows, 8, 13, 16)
    more = rounds.more(torch.tensor([0] * 4 + [1] * 4 + [9] * 4), torch.tensor([0.0] * 4 + [1.0] * 4 + [0.0] * 4))
    assert helping(0.0, "et", 4, 32) == 6
    assert [(r.group, r.n) for r in more] == [(0, 13 - 4 - 4)]  # without those given, and its own first ones
    row = PlanRow(3, 7, 0, spare=8, edit={"prompt": "x"}, prefix=(1,), max_tokens=5, payload="mine")
    rounds = Rounds(dars_stack(16), [row], 16, 16, 16)
    (more_row,) = rounds.more(torch.full((8,), 7), torch.zeros(8).double())
    assert more_row == row.replace(n=8, spare=0)


def test_beside_a_method_with_a_spare_rollout() -> None:
    """mc_grpo's pivot leaves after the filter; nothing overflows."""
    for size in (16, 8):
        for methods in ([McGrpo(), Dars()], [Dars(), McGrpo()]):
            stack = start_stack(*methods, run=make_run(group_size=size))
            rollouts, rounds = generated(stack, right(0, 1, 3, 3, of=9), size)
            assert [r.spare for r in rounds.rows[:4]] == [9] * 4, "the pivot is asked for in both orders"
            assert all(r.n >= 0 for r in rounds.rows) and sum(r.n for r in rounds.rows) <= 4 * size
            one_step(stack, rollouts, budget=4 * size)


def test_what_leaves_for_certain_asks_for_nothing() -> None:
    """With `upper` 0.25, one right of four leaves, and its room goes to the prompt without a success."""
    (method,) = dars_stack(6, n_first=4, upper=0.25).methods
    some, none = torch.tensor([1.0, 0, 0, 0]).double(), torch.zeros(4).double()
    so_far = (GroupSoFar(PlanRow(0, 0, 0, spare=4), some), GroupSoFar(PlanRow(1, 1, 0, spare=4), none))
    rows = method.plan(Plan((), 6, 9, 1, so_far)).rows
    assert [(r.group, r.n) for r in rows] == [(1, 5)]


def test_rows_that_another_method_added_in_the_round_take_room() -> None:
    """Of 20 rows 8 are the first rollouts, 5 another method's."""
    (method,) = dars_stack(8).methods
    added = PlanRow(4, 9, 5)
    so_far = (GroupSoFar(PlanRow(0, 0, 0, spare=8), torch.zeros(8).double()),)
    assert method.plan(Plan((added,), 8, 20, 1, so_far)).rows == (added, PlanRow(0, 0, 7))


def test_rows_of_a_batch() -> None:
    """4 prompts, 40 rows: one prompt without a success may get 24, two 24, three 16, four 8."""
    for first, successes in (((0, 8, 8, 8), 1), ((0, 0, 8, 8), 2), ((0, 0, 0, 8), 3), ((0, 0, 0, 0), 4)):
        rollouts, _ = generated(dars_stack(10), right(*first), 10)
        assert len(rollouts) == 32 + min(24 * successes, 40 - 8 * successes) <= 56


# ---- parameters and hosts


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"n_max": 7}, "`n_max` is 7, below `n_first` = 8"),
        ({"n_first": 33}, "`n_max` is 32, below `n_first` = 33"),
        ({"schedule": "ET"}, "`schedule`"),
        ({"upper": 0.0}, "`upper` is 0"),
        ({"upper": 1.1}, "`upper` is 1.1"),
        ({"n_first": 0}, "`n_first` is 0"),
    ],
)
def test_parameters_that_cannot_be(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_params(Dars.Params, params, "dars")
    assert text in str(caught.value)


def test_the_papers_values() -> None:
    p = Dars.Params()
    assert (p.n_first, p.most, p.upper, p.use_std, p.schedule) == (8, 32, 1.0, False, "et")
    assert Dars.Params(schedule="hw").most == 64 and Dars.Params(n_max=9).most == 9


def test_the_group_size_must_hold_the_first_rollouts() -> None:
    with pytest.raises(
        ConfigError, match=r"`n_first` is 8, but the batch has room for 7 rollouts per prompt\. Raise the group"
    ):
        dars_stack(7)
    dars_stack(8)


def test_another_method_that_decides_the_number_is_refused() -> None:
    with pytest.raises(ConfigError, match="`dars` and `v0` both decide how many rollouts prompts get"):
        build_stack(["dars", "v0"])


def test_options_of_the_estimator_follow_the_schedule() -> None:
    assert Dars(Dars.Params(use_std=True)).host_options == {
        "trl": {"scale_rewards": "group"},
        "verl": {"algorithm.norm_adv_by_std_in_grpo": True},
    }
    assert "advantages" not in Dars.claims()


def test_breadth_sets_options_and_nothing_else() -> None:
    method = DarsBreadth(DarsBreadth.Params(passes=3))
    assert DarsBreadth.claims() == () and method.host_options == {
        "trl": {
            "num_iterations": 3,
            "steps_per_generation": SameAs("gradient_accumulation_steps"),
            "loss_type": "dr_grpo",
        },
        "verl": {
            "actor_rollout_ref.actor.ppo_epochs": 3,
            "actor_rollout_ref.actor.ppo_mini_batch_size": SameAs("data.train_batch_size"),
            "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-sum-norm",
            "actor_rollout_ref.actor.loss_scale_factor": SameAs("data.max_response_length"),
        },
    }
    assert list(DARS_B.parts) == ["dars", "dars_breadth"]
    assert build_stack(["dars_b"]).names == ["dars", "dars_breadth"]


def trl_options(methods: list[str], method_params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    from rl_plugins.trl import capabilities
    from rl_plugins.trl.config import GRPOConfig

    values = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 2, "num_generations": 8} | changes
    args = GRPOConfig(output_dir="x", use_cpu=True, bf16=False, report_to="none", max_steps=2, **values)
    stack = build_stack(methods, method_params)
    return preflight(stack, capabilities.trl_capabilities(stack, capabilities.KnownRun(args, size=16, total_steps=2)))


def test_breadth_in_trl() -> None:
    passes = {"dars_breadth": {"passes": 3}}
    assert trl_options(["dars_b"], passes) == {"scale_rewards": "none", "num_iterations": 3, "loss_type": "dr_grpo"}
    with pytest.raises(ConfigError, match="`dars_breadth` sets steps_per_generation=2, but the config has .*=4"):
        trl_options(["dars_breadth"], {}, steps_per_generation=4)
    with pytest.raises(ConfigError, match="sets loss_type='dr_grpo', but the config has loss_type='grpo'"):
        trl_options(["dars_breadth"], {}, loss_type="grpo")
    with pytest.raises(ConfigError, match="`dars` sets scale_rewards='none', but the config has scale_rewards='batch'"):
        trl_options(["dars"], {}, scale_rewards="batch")


def verl_options(methods: list[str], *overrides: str) -> dict[str, Any]:
    pytest.importorskip("verl")
    from rl_plugins.verl import capabilities
    from rl_plugins.verl.config import Settings, compose

    config = compose(list(overrides))
    stack = build_stack(methods)
    return preflight(stack, capabilities.verl_capabilities(stack, Settings(methods=tuple(methods)), config))


def test_breadth_in_verl() -> None:
    size = ["data.train_batch_size=24", "data.max_response_length=77", "actor_rollout_ref.rollout.n=8"]
    actor = "actor_rollout_ref.actor"
    breadth = {
        f"{actor}.ppo_epochs": 2,
        f"{actor}.ppo_mini_batch_size": 24,
        f"{actor}.loss_agg_mode": "seq-mean-token-sum-norm",
        f"{actor}.loss_scale_factor": 77,
    }
    assert verl_options(["dars_b"], *size) == {"algorithm.norm_adv_by_std_in_grpo": False, **breadth}
    assert verl_options(["dars_breadth"], *size, f"{actor}.ppo_mini_batch_size=24") == {
        k: v for k, v in breadth.items() if "mini_batch" not in k
    }
    with pytest.raises(ConfigError, match="ppo_mini_batch_size=24, but the config has .*=12"):
        verl_options(["dars_breadth"], *size, f"{actor}.ppo_mini_batch_size=12")


def test_rounds_need_verls_sync_trainer() -> None:
    pytest.importorskip("verl")
    from rl_plugins.verl import capabilities
    from rl_plugins.verl.config import Settings, compose

    def check(methods: list[str], mode: str) -> dict[str, Any]:
        size = ["data.train_batch_size=24", "data.max_response_length=77", "actor_rollout_ref.rollout.n=8"]
        config = compose([*size, f"trainer.v1.trainer_mode=rl_plugins_{mode}", "algorithm.adv_estimator=grpo"])
        return capabilities.check(build_stack(methods), Settings(methods=tuple(methods)), config)

    assert check(["dars_b"], "sync")["actor_rollout_ref.actor.ppo_mini_batch_size"] == 24
    assert check(["xrpo"], "sync") == check(["xrpo_novelty"], "colocate_async") == {}
    for methods, names in ((["dars"], "`dars`"), (["xrpo"], "`xrpo_allocate`, `xrpo_seeds`")):
        for mode in ("colocate_async", "separate_async"):
            with pytest.raises(ConfigError, match=f"{names} generates in rounds, and a batch of {mode}"):
                check(methods, mode)
