"""GRPO-RoC against the authors' numbers and a plain loop, its properties, and through the whole driver."""

from __future__ import annotations

import logging
import math
import re

import pytest
import torch
from golden_cases import Case, Golden, floats
from hypothesis import given, settings
from hypothesis import strategies as st
from one_method import acting, changed

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.methods.grpo_roc import GrpoRoc, _quota
from rl_plugins.methods.mc_grpo import McGrpo
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.testing import make_plan, make_rollouts, make_run, make_tokens, one_step, start_stack

GOLDEN = Golden("grpo_roc")
NAN = float("nan")


def penalty_column(rollouts):
    return torch.tensor(rollouts.meta["penalty"], dtype=torch.float64)


penalty_column.needs = {"column:penalty"}


def method(**params) -> GrpoRoc:
    return GrpoRoc(GrpoRoc.Params(**acting(GrpoRoc.Params, params)))


def planned(m: GrpoRoc, target: int, groups: int = 8, others: int = 0) -> GrpoRoc:
    """`m` as after a plan that trains `target` rollouts of each group, however many were generated."""
    m.state = {"planned": {str(g): [target, 99, others] for g in range(groups)}}
    return m


def kept(m: GrpoRoc, rewards, penalty, group, target, kept=None, rollout=None) -> list[int]:
    changes = {} if rollout is None else {"rollout": torch.tensor(rollout)}
    if kept is not None:
        changes["kept"] = torch.tensor(kept)
    rollouts = make_rollouts(rewards, group, meta={"penalty": penalty}, **changes)
    return planned(m, target).select(rollouts).nonzero()[:, 0].tolist()


def quota_oracle(pos: int, neg: int, target: int, min_pos: int, min_neg: int) -> tuple[int, int]:
    """The authors' numbers of correct and wrong rows, step by step, and whether they add up to the target."""
    n = pos + neg
    k_neg, k_pos = round(neg * target / n), round(pos * target / n)
    if k_neg <= min(min_neg, neg):
        k_neg = min(min_neg, neg)
        k_pos = target - k_neg
    if k_pos <= min(min_pos, pos):
        k_pos = min(min_pos, pos)
        k_neg = target - k_pos
    return k_pos, k_neg


def oracle(rewards, penalty, group, here, target, min_pos, min_neg, reject):
    """The method as loops over groups and rows."""
    out = []
    for g in sorted(set(group)):
        rows = [i for i, h in enumerate(group) if h == g and here[i] and not math.isnan(rewards[i])]
        if not rows:
            continue
        if reject and max(rewards[i] for i in rows) - min(rewards[i] for i in rows) <= 1e-8:
            continue
        if len(rows) < target:
            continue
        if len(rows) == target:
            out += rows
            continue
        pos = sorted((i for i in rows if rewards[i] > 0), key=lambda i: penalty[i])
        neg = [i for i in rows if rewards[i] <= 0]
        k_pos, k_neg = quota_oracle(len(pos), len(neg), target, min_pos, min_neg)
        if k_pos + k_neg != target:
            k_pos = min(target - k_neg, len(pos))
            k_neg = target - k_pos
        out += pos[:k_pos] + neg[:k_neg]
    return sorted(out)


# ---- numbers of the authors


@GOLDEN.kind("responses")
def check_selection(case):
    inputs, p, expected = case.inputs, case.params, case.expected
    ids, target = sorted(set(inputs["uids"])), p["down_sample_to_n"]
    names = {
        "roc_error_ratio": "use_error",
        "roc_answer_format": "use_format",
        "min_zero_reward_trace_num": "min_wrong",
        "min_non_zero_reward_trace_num": "min_correct",
    }
    params = case.build(GrpoRoc, names, reject_equal_reward=False, count_first_turn=False)
    group = [ids.index(u) for u in inputs["uids"]]
    rollouts = make_rollouts(floats(inputs["rewards"]), group, raw_text=inputs["responses"])
    rows = planned(GrpoRoc(params), target, groups=len(ids)).select(rollouts).nonzero()[:, 0].tolist()
    ranks = p.get("world_size", 1)
    if expected["raises"] is None:  # the authors cut the tail, the adapters do not
        assert rows[: len(rows) // ranks * ranks] == expected["kept_rows"]
    else:  # their numbers of correct and wrong rows do not add up; here they do
        assert expected["kept_rows"] is None
        correct = [r > params.correct_threshold for r in inputs["rewards"]]
        of_group = [[c for c, g in zip(correct, group, strict=True) if g == k] for k in range(len(ids))]
        minima = params.min_correct, params.min_wrong
        sums = [sum(quota_oracle(sum(g), len(g) - sum(g), target, *minima)) for g in of_group if len(g) > target]
        assert any(total != target for total in sums)
        for k, members in enumerate(of_group):
            assert sum(group[row] == k for row in rows) == (target if len(members) >= target else 0)
    for which, numbers in (("use_error", expected["p_err"]), ("use_format", expected["p_format"])):
        only = changed(params, **{"use_error": False, "use_format": False, which: True})
        assert GrpoRoc(only)._penalty(rollouts).tolist() == pytest.approx(numbers, abs=1e-15)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case):
    GOLDEN.check(case)


def test_further_golden_cases():
    GOLDEN.check_further_cases()


@pytest.mark.parametrize(("correct", "raises"), [(5, True), (4, False)])
def test_a_case_in_which_the_authors_assertion_fires(correct, raises):
    minima = {"min_zero_reward_trace_num": 1, "min_non_zero_reward_trace_num": 1}
    given_params = GOLDEN.cases[0].values["params"] | minima | {"down_sample_to_n": 5}
    rewards = [1.0] * correct + [0.0] * (10 - correct)
    inputs = {"uids": ["a"] * 10, "rewards": rewards, "responses": [""] * 10}
    expected = {"p_err": [0.5] * 10, "p_format": [1.0] * 10, "kept_rows": None, "raises": "AssertionError"}
    values = {"name": "halves", "inputs": inputs, "params": given_params, "expected": expected}
    if raises:
        GOLDEN.check(Case("grpo_roc.json", values))
    else:
        with pytest.raises(AssertionError):
            GOLDEN.check(Case("grpo_roc.json", values))


@pytest.mark.parametrize(("min_pos", "min_neg"), [(0, 0), (2, 2), (1, 3), (4, 2)])
def test_quota_equals_the_authors_wherever_their_assertion_holds_and_adds_up_everywhere(min_pos, min_neg):
    cases = [
        (pos, n - pos, target)
        for n in range(2, 20)
        for target in range(max(1, min_pos + min_neg), n)
        for pos in range(n + 1)
    ]
    pos, neg, target = torch.tensor(cases, dtype=torch.float64).T
    k_pos, k_neg = _quota(pos, neg, target, min_pos, min_neg)
    assert bool((k_pos + k_neg == target).all())
    assert bool(((k_pos >= 0) & (k_pos <= pos) & (k_neg >= 0) & (k_neg <= neg)).all())
    asserted = 0
    for case, mine in zip(cases, zip(k_pos.tolist(), k_neg.tolist(), strict=True), strict=True):
        theirs = quota_oracle(*case, min_pos, min_neg)
        if sum(theirs) == case[2]:
            assert mine == theirs, case
        else:
            asserted += 1
    assert len(cases) > 500 and asserted > 0


def test_quota_of_a_target_below_the_minimum_numbers_still_adds_up():
    cases = [(pos, n - pos, target) for n in range(2, 12) for target in range(n) for pos in range(n + 1)]
    pos, neg, target = torch.tensor(cases, dtype=torch.float64).T
    for min_pos, min_neg in ((3, 0), (0, 3), (2, 2), (4, 4)):
        k_pos, k_neg = _quota(pos, neg, target, min_pos, min_neg)
        assert bool((k_pos + k_neg == target).all())
        assert bool(((k_pos >= 0) & (k_pos <= pos) & (k_neg >= 0) & (k_neg <= neg)).all())


def test_two_halves_that_round_down_are_repaired():
    assert [k.item() for k in _quota(torch.tensor([5.0]), torch.tensor([5.0]), torch.tensor([5.0]), 1, 1)] == [3, 2]
    nine = _quota(torch.tensor([9.0]), torch.tensor([9.0]), torch.tensor([9.0]), 4, 2)
    assert [k.item() for k in nine] == [4, 5]  # the authors' numbers: a repair before the minimum rules gives 5, 4


# ---- the loop

rows = st.lists(
    st.tuples(
        st.sampled_from([0.0, 1.0, 0.5, -1.0, NAN]),
        st.sampled_from([0.0, 0.25, 0.5, 1.5]),
        st.integers(0, 3),
        st.sampled_from([True, True, True, False]),
    ),
    min_size=1,
    max_size=40,
)


@settings(max_examples=60, deadline=None)
@given(rows=rows, target=st.integers(2, 7), reject=st.booleans(), data=st.data())
def test_equals_the_loop_on_ragged_interleaved_groups_with_nan(rows, target, reject, data):
    rewards, penalty, group, here = (list(x) for x in zip(*rows, strict=True))
    min_pos = data.draw(st.integers(0, target))
    min_neg = data.draw(st.integers(0, target - min_pos))
    m = method(penalty=penalty_column, min_correct=min_pos, min_wrong=min_neg, reject_equal_reward=reject)
    got = kept(m, rewards, penalty, group, target, here)
    assert got == oracle(rewards, penalty, group, here, target, min_pos, min_neg, reject)


@settings(max_examples=40, deadline=None)
@given(rows=rows, seed=st.integers(0, 99), selection=st.sampled_from(["top", "inverse_prob"]))
def test_the_order_of_the_rows_does_not_matter(rows, seed, selection):
    rewards, penalty, group, _ = (list(x) for x in zip(*rows, strict=True))
    rollouts = make_rollouts(rewards, group, meta={"penalty": penalty})
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    mixed = rollouts.replace(
        group=rollouts.group[order],
        rollout=rollouts.rollout[order],
        reward=rollouts.reward[order],
        meta={"penalty": [penalty[i] for i in order]},
    )
    stays = []
    for r in (rollouts, mixed):
        m = method(penalty=penalty_column, positive_selection=selection, min_wrong=1, min_correct=1)
        start_stack(m)
        stays.append(planned(m, 3).select(r))
    assert torch.equal(stays[0][order], stays[1])


# ---- properties


def test_group_size_cleanest_correct_rows_and_undiscriminated_wrong_rows():
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        reward = (torch.rand(32, generator=generator) < torch.rand(1, generator=generator)).double()
        penalty = torch.rand(32, generator=generator)
        m = method(penalty=penalty_column, reject_equal_reward=False)
        stay = kept(m, reward, penalty.tolist(), [0] * 16 + [1] * 16, target=8)
        assert [sum(i < 16 for i in stay), sum(i >= 16 for i in stay)] == [8, 8]
        for g in (range(16), range(16, 32)):
            correct = [i for i in g if reward[i] > 0]
            inside = [penalty[i] for i in correct if i in stay]
            outside = [penalty[i] for i in correct if i not in stay]
            assert not inside or not outside or max(inside) <= min(outside)
            wrong = [i for i in g if reward[i] <= 0]
            assert [i for i in wrong if i in stay] == wrong[: sum(i in stay for i in wrong)]


def test_ties_and_wrong_rows_go_by_rollout_number():
    m = method(penalty=penalty_column)
    rewards, penalty = [1, 1, 1, 1, 0, 0, 0, 0], [0.5, 0.5, 0.0, 0.5, 0.0, 1.0, 2.0, 0.0]
    assert kept(m, rewards, penalty, [0] * 8, 4) == [0, 2, 4, 5]
    assert kept(m, rewards, penalty, [0] * 8, 4, rollout=[7, 6, 5, 4, 3, 2, 1, 0]) == [2, 3, 6, 7]


def test_all_correct_keeps_the_cleanest_and_all_wrong_the_first():
    m = method(penalty=penalty_column, reject_equal_reward=False)
    penalty = [0.5, 0.1, 0.9, 0.0, 0.4, 0.3]
    assert kept(m, [1.0] * 6, penalty, [0] * 6, 4) == [1, 3, 4, 5]
    assert kept(m, [0.0] * 6, penalty, [0] * 6, 4) == [0, 1, 2, 3]
    assert kept(method(penalty=penalty_column), [1.0] * 6 + [0.0] * 6, penalty * 2, [0] * 6 + [1] * 6, 4) == []


def test_equal_rewards_are_compared_like_allclose():
    m = method(penalty=penalty_column, min_wrong=0, min_correct=0)
    group = [0] * 4 + [1] * 4
    stay = kept(m, [1.0, 1.0 + 5e-6, 1.0, 1.0, 1.0, 1.0 + 5e-5, 1.0, 1.0], [0.0] * 8, group, 2)
    assert stay == [4, 5]


def test_threshold_is_strict_and_can_be_moved():
    rewards, penalty = [0.0, 0.5, 0.6, 0.7, 0.0, 0.5, 0.6, 0.7], [0.0, 3, 2, 1, 0, 3, 2, 1]
    assert kept(method(penalty=penalty_column), rewards, penalty, [0] * 8, 4) == [0, 3, 4, 7]
    higher = method(penalty=penalty_column, correct_threshold=0.5)
    assert kept(higher, rewards, penalty, [0] * 8, 4) == [0, 1, 3, 7]  # 0.5 is wrong now


def test_unscorable_rows_leave_before_counting():
    m = method(penalty=penalty_column)
    rewards = [NAN, NAN, 1, 1, 0, 0, 0, 0] + [NAN, NAN, NAN, NAN, 1, 1, 0, 0] + [NAN] * 5 + [1, 0, 0]
    stay = kept(m, rewards, [1.0, 0.0] * 12, [0] * 8 + [1] * 8 + [2] * 8, 4)
    assert stay == [2, 3, 4, 5, 12, 13, 14, 15]


@pytest.mark.parametrize(("short_groups", "expected"), [("drop", [3, 4, 6, 7]), ("keep", [0, 1, 2, 3, 4, 6, 7])])
def test_short_groups(short_groups, expected, caplog):
    m = method(penalty=penalty_column, short_groups=short_groups)
    start_stack(m)
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        assert kept(m, [1, 0, 0, 1, 1, 1, 0, 0, 0], [0.0, 1, 1] * 3, [0] * 3 + [1] * 6, 4) == expected
    assert "short_groups" in caplog.text


def test_neutral_is_grpo():
    rewards = [1.0, 0, 0, 1, 1, 1, 0, 0, 0.5, 1, 0, 0]
    m = method(use_error=False, use_format=False)
    assert m.needs == set()
    stack = start_stack(m)
    planned(m, 4)
    decision = one_step(stack, make_rollouts(rewards))
    assert decision.trained.all()
    plain = grpo_advantages(make_rollouts(rewards))
    assert torch.equal(decision.advantages, plain[make_tokens(make_rollouts(rewards)).row])


def test_rollouts_of_several_rows_stay_or_leave_together():
    rewards = [1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0]
    penalty = [0.0, 1.0, 0.3, 0.4, 0.9, 0.9, 0.0, 0.0] + [0.0] * 8
    rollout = [i // 2 for i in range(16)]
    m = method(penalty=penalty_column)
    assert kept(m, rewards, penalty, [0] * 16, 4, rollout=rollout) == [2, 3, 6, 7, 8, 9, 10, 11]


# ---- penalty


def text(*responses: str, answer="<answer>1</answer>", opened=True) -> str:
    turn, tool = (
        "<|im_start|>assistant\n{}<|im_end|>\n",
        "<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n",
    )
    out = "".join(turn.format("<tool_call>{}</tool_call>") + tool.format(r) for r in responses) + turn.format(answer)
    return out if opened else out.removeprefix("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("raw_text", "error", "form"),
    [
        (text("42"), 0.0, 0.0),
        (text(), 0.5, 0.0),
        (text("NameError: x", "4", "4", "4"), 0.25, 0.0),
        (text("ERROR", "an error\nan error"), 1.0, 0.0),
        (text(answer=""), 0.5, 1.0),
        (text(answer="<answer>1"), 0.5, 1.0),
        (text(answer="<answer>1</answer></answer>"), 0.5, 1.0),
        (text("1", answer="<answer>1</answer><answer>2</answer>"), 0.0, 0.5),
        (text(answer="<answer>1</answer>" * 3), 0.5, 1.0),
    ],
)
def test_built_in_penalty(raw_text, error, form):
    rollouts = make_rollouts([1.0], raw_text=[raw_text])
    assert method(use_format=False)._penalty(rollouts).tolist() == [error]
    assert method(use_error=False)._penalty(rollouts).tolist() == [form]
    assert method()._penalty(rollouts).tolist() == [error + form]


def test_the_first_turn_is_opened_by_the_prompt():
    single, double = text(opened=False), text("1", answer="<answer>1</answer><answer>2</answer>", opened=False)
    assert [method()._format_penalty(t) for t in (single, double)] == [0.0, 0.5]
    literal = method(count_first_turn=False)
    assert [literal._format_penalty(t) for t in (single, double)] == [1.0, 1.0]


def test_other_tags_and_keyword():
    m = method(
        tool_tags="[TOOL],[/TOOL]", answer_tags=("\\boxed{", "}"), turn_tags=["<a>", "</a>"], error_keyword="Failed"
    )
    raw = "[TOOL]call failed[/TOOL][TOOL]error[/TOOL]</a><a>\\boxed{3}</a>"
    assert m._penalty(make_rollouts([1.0], raw_text=[raw])).tolist() == [0.5]
    assert m._penalty(make_rollouts([1.0], raw_text=[raw + "\\boxed{4}"])).tolist() == [1.0]


def test_a_warning_when_no_text_has_the_tags(caplog):
    stack = start_stack(method())
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        one_step(stack, make_rollouts([1.0, 0, 1, 0] * 2, group_size=8, raw_text=["plain"] * 8))
    assert "turn_tags" in caplog.text


def test_a_penalty_of_the_user_says_what_it_reads():
    assert method().needs == {"raw_text"}
    assert method(penalty=penalty_column).needs == {"column:penalty"}
    assert method(penalty=lambda r: r.length).needs == set()

    def reads_messages(rollouts):
        return [0] * len(rollouts)

    reads_messages.needs = "messages"
    assert method(penalty=reads_messages).needs == {"messages"}
    assert start_stack(method(penalty=reads_messages)).needs == {"messages"}
    assert method(penalty="math:fsum").params.penalty is math.fsum


@pytest.mark.parametrize(
    "penalty",
    [lambda r: [0.0], lambda r: [-1.0] * len(r), lambda r: [NAN] * len(r), lambda r: torch.zeros(len(r), 1)],
)
def test_an_illegal_penalty_is_refused(penalty):
    stack = start_stack(method(penalty=penalty))
    with pytest.raises(MethodError, match="one finite number >= 0 per row"):
        one_step(stack, make_rollouts([1.0, 0, 0, 0, 1, 1, 1, 0], group_size=8))


def test_inverse_prob_draws_by_weight():
    penalty, times = [0.0, 0.3, 0.9, 0.9, 0, 0, 0, 0], 4000
    m = method(penalty=penalty_column, positive_selection="inverse_prob", min_correct=1, min_wrong=3)
    start_stack(m)
    rollouts = make_rollouts([1, 1, 1, 1, 0, 0, 0, 0] * times, group_size=8, meta={"penalty": penalty * times})
    counts = planned(m, 4, groups=times).select(rollouts).view(times, 8).sum(0)
    weights = torch.tensor([1 / 0.1, 1 / 0.4, 1 / 1.0, 1 / 1.0])
    assert counts[:4].sum() == times  # min_wrong = 3 leaves one correct rollout
    assert (counts[:4] / times).tolist() == pytest.approx((weights / weights.sum()).tolist(), abs=0.03)
    assert counts[4:].tolist() == [times, times, times, 0]


def test_inverse_prob_comes_close_to_top_for_small_eps_and_is_seeded():
    penalty, rewards = [0.5, 0.0, 0.25, 0.0, 0, 0, 0, 0], [1, 1, 1, 1, 0, 0, 0, 0]
    small = method(penalty=penalty_column, positive_selection="inverse_prob", inverse_eps=1e-30)
    start_stack(small)
    assert kept(small, rewards, penalty, [0] * 8, 4) == [1, 3, 4, 5]
    draws = []
    for seed in (0, 0, 1, 2, 3):
        m = method(penalty=penalty_column, positive_selection="inverse_prob", inverse_eps=100.0)
        start_stack(m, seed=seed)
        draws.append(tuple(kept(m, rewards * 8, penalty * 8, [i // 8 for i in range(64)], 4)))
    assert draws[0] == draws[1]
    assert len(set(draws)) == 4


# ---- parameters


@pytest.mark.parametrize(
    ("params", "match"),
    [
        ({"oversample": 1.0}, "oversample"),
        ({"min_wrong": -1}, "min_wrong"),
        ({"min_correct": -1}, "min_correct"),
        ({"inverse_eps": 0.0}, "inverse_eps"),
        ({"positive_selection": "best"}, "positive_selection"),
        ({"short_groups": "pad"}, "short_groups"),
        ({"tool_tags": ("<a>",)}, "tool_tags"),
        ({"answer_tags": ("<a>", "")}, "answer_tags"),
        ({"turn_tags": "a,b,c"}, "turn_tags"),
        ({"penalty": "nowhere:f"}, "penalty"),
        ({"penalty": len, "use_error": False}, "no effect"),
        ({"oversampling": 2.0}, "oversampling"),
    ],
)
def test_parameters_out_of_range(params, match):
    with pytest.raises(ConfigError, match=match):
        build_params(GrpoRoc.Params, params, "grpo_roc")


def test_minimum_numbers_must_fit_the_group_size():
    with pytest.raises(ConfigError, match=re.escape("min_wrong + min_correct = 2 + 2")):
        start_stack(method(), run=make_run(group_size=3))
    assert method(min_wrong=1, min_correct=2).plan(make_plan(group_size=3)).generated == 24


# ---- plan, and other methods


@pytest.mark.parametrize(
    ("oversample", "n", "spare"), [(2.0, 4, 4), (1.5, 5, 3), (1.1, 50, 5), (1.01, 4, 1), (4, 16, 48), (2.0, 0, 0)]
)
def test_plan_asks_for_spare_rollouts(oversample, n, spare):
    plan = method(oversample=oversample, min_wrong=0, min_correct=0).plan(make_plan(3, n))
    assert [(r.n, r.spare) for r in plan.rows] == [(n, spare)] * 3
    assert plan.trained == 3 * n


def test_the_plan_is_relative_and_keeps_payloads():
    m = method()
    rows = (PlanRow(7, 0, 4, spare=1, payload="other"), PlanRow(8, 1, 6), PlanRow(9, 1, 2))
    plan = m.plan(make_plan().replace(rows=rows))
    assert [(r.prompt_index, r.n, r.spare, r.payload) for r in plan.rows] == [
        (7, 4, 5, "other"),
        (8, 6, 6, None),
        (9, 2, 2, None),
    ]
    assert m.state == {"planned": {"0": [4, 4, 1], "1": [8, 8, 0]}}


def generated(plan, reward):
    """Rollouts as a host makes them from a plan; `reward` by number in the group."""
    group = [r.group for r in plan.rows for _ in range(r.n + r.spare)]
    number = [i for r in plan.rows for i in range(r.n + r.spare)]
    rewards = [reward(i) for i in number]
    return make_rollouts(rewards, group, meta={"penalty": [float(i) for i in number]})


class Freeze(Method):
    """Changes a plan or removes rows like another method."""

    name = "freeze"
    n: int | None = None
    spare = 0
    leave: tuple[int, ...] = ()

    def plan(self, plan):
        rows = [r.replace(n=self.n or r.n, spare=r.spare + self.spare) for r in plan.rows]
        return plan.replace(rows=tuple(rows))

    def select(self, rollouts):
        return torch.tensor([int(i) not in self.leave for i in rollouts.rollout])


def other(**attributes) -> Freeze:
    method = Freeze()
    for name, value in attributes.items():
        setattr(method, name, value)
    return method


@pytest.mark.parametrize("first", [True, False])
def test_another_methods_spare_rollouts_stay_for_it(first):
    roc, mc = method(penalty=penalty_column), McGrpo(McGrpo.Params(scale="none"))
    stack = start_stack(*((mc, roc) if first else (roc, mc)))
    plan = first_plan(stack, [0, 1, 2, 3], 4, 16, 16)
    assert [(r.n, r.spare) for r in plan.rows] == [(4, 5)] * 4
    rollouts = generated(plan, lambda i: float(i % 3 == 0) + 0.01 * i)
    decision = one_step(stack, rollouts, budget=16)
    assert torch.bincount(rollouts.group[decision.rollouts.kept]).tolist() == [5] * 4
    assert torch.bincount(rollouts.group[decision.trained]).tolist() == [4] * 4  # without the pivot of MC-GRPO


def sizes(*methods, reward=lambda i: float(i % 2)) -> list[int]:
    stack = start_stack(*methods)
    rollouts = generated(first_plan(stack, [0, 1], 4, 12, 2), reward)
    kept = one_step(stack, rollouts, budget=12).rollouts.kept
    assert not next(m.state for m in methods if m.name == "grpo_roc")
    return torch.bincount(rollouts.group[kept], minlength=2).tolist()


def test_targets_beside_other_methods():
    roc = lambda: method(penalty=penalty_column)
    assert sizes(roc()) == [4, 4]
    assert sizes(other(n=6), roc()) == [6, 6]  # another allocation, before and after
    assert sizes(roc(), other(n=6)) == [6, 6]
    assert sizes(other(spare=2, leave=(0, 1)), roc()) == [4, 4]  # its own two left already
    assert sizes(roc(), other(spare=2, leave=(0, 1))) == [4, 4]  # or leave later
    assert sizes(other(leave=(0, 1)), roc()) == [4, 4]  # a filter without spare rollouts: ours fill the gap
    assert sizes(other(spare=2), roc()) == [6, 6]  # two that leave in a later hook
    assert sizes(other(n=2), roc()) == [2, 2]  # fewer than min_wrong + min_correct


def test_groups_that_were_not_planned_are_counted():
    m = method(penalty=penalty_column, oversample=1.5, min_wrong=1, min_correct=1)
    rollouts = make_rollouts([1.0, 0, 0, 1, 0, 1, 0, 1, 0, 1], [0] * 5 + [1] * 3 + [2] * 2, meta={"penalty": [0] * 10})
    keep = m.select(rollouts)
    assert torch.bincount(rollouts.group[keep]).tolist() == [3, 2, 1]


# ---- the whole driver


def test_step_trains_the_selection_with_its_own_statistics():
    m = method(penalty=penalty_column)
    stack = start_stack(m)
    plan = first_plan(stack, [3, 1], 4, 8, 16)
    assert (plan.trained, plan.generated) == (8, 16)
    rewards = [1.0, 1, 1, 1, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    penalty = [2.0, 0, 1, 0.5, 0, 0, 0, 0, 2.0, 0, 0, 0, 0, 0, 0, 0]
    rollouts = make_rollouts(rewards, group_size=8, meta={"penalty": penalty})
    decision = one_step(stack, rollouts, budget=8)
    trained = decision.trained.nonzero()[:, 0].tolist()
    assert trained == [1, 3, 4, 5, 8, 9, 10, 11]
    survivors = make_rollouts([rewards[i] for i in trained], group_size=4)
    assert decision.row_advantages[trained].tolist() == pytest.approx(grpo_advantages(survivors).tolist(), abs=1e-12)
    assert decision.row_advantages[~decision.trained].abs().sum() == 0
    logged = combine([stack.metrics.take()])
    assert logged["grpo_roc/correct"] == pytest.approx(5 / 16)
    assert logged["grpo_roc/penalty_correct"] == pytest.approx((2 + 0 + 1 + 0.5 + 2) / 5)
    assert logged["grpo_roc/penalty_kept"] == pytest.approx((0 + 0.5 + 2) / 3)
    assert [logged[f"grpo_roc/{k}"] for k in ("kept", "equal_groups", "short_groups")] == [8, 0, 0]
    assert stack.state_dict("f")["methods"]["grpo_roc"]["state"] == {}


def test_tool_errors_of_correct_rollouts_are_logged():
    stack = start_stack(method())
    texts = [text("error", "1"), text("1"), text(), text("error"), text("error"), text(), text(), text()]
    one_step(stack, make_rollouts([1.0, 1, 1, 0, 0, 0, 0, 0], group_size=8, raw_text=texts))
    assert combine([stack.metrics.take()])["grpo_roc/tool_errors"] == pytest.approx((0.5 + 0.0) / 2)


def test_a_step_in_which_every_group_leaves_trains_nothing(caplog):
    stack = start_stack(method(penalty=penalty_column))
    with caplog.at_level(logging.WARNING, "rl_plugins"):
        decision = one_step(stack, make_rollouts([1.0] * 8 + [0.0] * 8, group_size=8, meta={"penalty": [0] * 16}))
    assert not decision.trained.any()
    assert "nothing is trained" in caplog.text
    logged = combine([stack.metrics.take()])
    assert [logged["grpo_roc/equal_groups"], logged["grpo_roc/kept"]] == [2, 0]
