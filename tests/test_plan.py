"""What is generated: the plan of a batch. Every return value is checked."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from one_method import UNREADABLE, Exits, method, refused

from rl_plugins.core.errors import MethodError
from rl_plugins.core.requests import Turn
from rl_plugins.core.rollouts import Completion, GroupSoFar, Plan, PlanRow
from rl_plugins.runtime.plan import (
    admitted_prompts,
    check_length,
    check_rewards,
    check_versions,
    evaluation_plan,
    first_plan,
    next_plan,
    split_plan,
)
from rl_plugins.runtime.stack import MethodStack

# ---- first plan


def plan_of(*methods, proposal=(3, 1, 4), group_size=4, budget=None, pool=20, seed=0, stack=None) -> Plan:
    stack = MethodStack(list(methods), seed) if stack is None else stack
    budget = len(proposal) * group_size if budget is None else budget
    return first_plan(stack, proposal, group_size, budget, pool)


def each(change):
    """A `plan` hook that changes every row."""
    return lambda plan: plan.replace(rows=tuple(change(r) for r in plan.rows))


def test_without_methods_the_plan_is_the_hosts_own():
    for stack in (MethodStack([]), MethodStack([method(shape=lambda r, t: None)])):
        stack.batch = 6
        plan = plan_of(stack=stack)
        assert plan == Plan((PlanRow(3, 0, 4), PlanRow(1, 1, 4), PlanRow(4, 2, 4)), 4, 0, batch=6)
        assert plan.trained == plan.generated == 12 and stack.extra_prompts == 0
    assert plan_of(method(plan=lambda plan: None)) == plan_of()


def test_what_a_plan_method_is_given():
    seen = []
    stack = MethodStack([method(plan=seen.append)])
    stack.batch = 2
    plan_of(stack=stack)
    assert seen == [Plan((PlanRow(3, 0, 4), PlanRow(1, 1, 4), PlanRow(4, 2, 4)), 4, 12, round=0, batch=2)]


def test_two_plan_methods_change_what_the_one_before_left():
    more = method("more", plan=each(lambda r: r.replace(spare=r.spare + 1)))
    double = method("double", plan=each(lambda r: r.replace(spare=2 * r.spare, payload=r.spare)))
    assert [r.spare for r in plan_of(more, double).rows] == [2, 2, 2]
    assert [r.spare for r in plan_of(double, more).rows] == [1, 1, 1]
    assert [r.payload for r in plan_of(more, double).rows] == [1, 1, 1]
    plan = plan_of(more)
    assert (plan.trained, plan.generated, plan.budget) == (12, 15, 0)  # spare rollouts cost no budget


def test_a_smaller_plan_is_filled_with_further_prompts_which_are_planned_too():
    calls = []

    def halved(plan):
        calls.append((len(plan.rows), plan.budget, plan.first))
        return plan.replace(rows=tuple(r.replace(n=2, spare=1) for r in plan.rows))

    stack = MethodStack([method(plan=halved)])
    plan = plan_of(stack=stack)
    assert [(r.n, r.spare) for r in plan.rows] == [(2, 1)] * 6 and (plan.trained, plan.budget) == (12, 0)
    assert [r.prompt_index for r in plan.rows[:3]] == [3, 1, 4]
    prompts = [r.prompt_index for r in plan.rows]
    assert len(set(prompts)) == 6 and all(0 <= p < 20 for p in prompts)
    assert [r.group for r in plan.rows] == [0, 1, 2, 3, 4, 5]
    assert calls == [(3, 12, True), (3, 6, False)] and stack.extra_prompts >= 3


def test_groups_that_are_all_spare_do_not_make_a_batch_ask_for_too_many_prompts() -> None:
    """Two of three prompts are probes: two further prompts are wanted, and no more are drawn."""
    asked = []

    def probing(plan):
        asked.append(len(plan.rows))
        probes = 0 if plan.rows[0].group else 2
        return plan.replace(rows=tuple(r.replace(n=0, spare=4) for r in plan.rows[:probes]) + plan.rows[probes:])

    plan = plan_of(method(plan=probing))
    assert [(r.n, r.spare) for r in plan.rows] == [(0, 4)] * 2 + [(4, 0)] * 3 and asked == [3, 2]


def test_a_plan_of_one_under_a_group_size_of_two_takes_twice_as_many_prompts():
    plan = plan_of(method(plan=each(lambda r: r.replace(n=1))), proposal=(0, 1, 2, 3), group_size=2)
    assert [r.n for r in plan.rows] == [1] * 8 and len({r.prompt_index for r in plan.rows}) == 8


@pytest.mark.parametrize(("late", "trained"), [(3, 3 + 2 * 4), (4, 3 + 5), (7, 3 + 8), (8, 3 + 9), (9, 3)])
def test_filling_never_exceeds_the_batch_and_never_cuts_a_group(late, trained):
    """Prompts beyond the proposal get more rollouts than fit, and some of them two plan rows in one group."""

    def uneven(plan):
        rows = [r.replace(n=1 if r.prompt_index in (3, 1, 4) else late) for r in plan.rows]
        return plan.replace(rows=(*rows, *(r.replace(n=1) for r in rows if r.prompt_index not in (3, 1, 4))))

    plan = plan_of(method(plan=uneven), budget=12)
    assert plan.trained == trained <= 12 and plan.trained + plan.budget == 12
    per_group = {g: sum(r.n for r in plan.rows if r.group == g) for g in {r.group for r in plan.rows}}
    assert set(per_group.values()) <= {1, late + 1}


def test_filling_ends_when_prompts_add_nothing_to_train():
    asked = []

    def only_proposed(plan):
        asked.append([r.prompt_index for r in plan.rows])
        return plan.replace(rows=tuple(r.replace(n=2 if r.prompt_index in (3, 1, 4) else 0) for r in plan.rows))

    plan = plan_of(method(plan=only_proposed))
    assert [(r.prompt_index, r.n) for r in plan.rows] == [(3, 2), (1, 2), (4, 2)] and plan.budget == 6
    assert len(asked) == 2
    probes = plan_of(method(plan=each(lambda r: r.replace(n=0, spare=2))))  # made to leave again, all of them
    assert [(r.prompt_index, r.spare) for r in probes.rows] == [(3, 2), (1, 2), (4, 2)]
    with pytest.raises(MethodError, match="asks for no rollout at all"):
        plan_of(method(plan=lambda plan: plan.replace(rows=())))


def test_a_small_dataset_is_used_once_at_most():
    plan = plan_of(method(plan=each(lambda r: r.replace(n=1))), pool=5)
    assert sorted(r.prompt_index for r in plan.rows) == [0, 1, 2, 3, 4] and plan.budget == 7
    foreign = each(lambda r: r if r.prompt_index != 3 else r.replace(prompt_index=-1, edit={"prompt": "x"}))
    plan = plan_of(method("a", plan=each(lambda r: r.replace(n=1))), method("b", plan=foreign), pool=5)
    assert sorted(r.prompt_index for r in plan.rows) == [-1, 0, 1, 2, 4]
    asked = []
    left_out = each(lambda r: asked.append(r.prompt_index) or r.replace(n=int(r.prompt_index not in (0, 3))))
    plan = plan_of(method(plan=left_out), pool=5)
    assert sorted(r.prompt_index for r in plan.rows) == [1, 2, 4] and sorted(asked) == [0, 1, 2, 3, 4]
    chosen = method(select_prompts=lambda pool, n: [i for i in range(5) if i not in pool.taken][:n], plan=left_out)
    assert sorted(r.prompt_index for r in plan_of(chosen, pool=5).rows) == [1, 2, 4]


def test_a_stream_has_the_prompts_of_the_host_only():
    stack = MethodStack([method(plan=each(lambda r: r.replace(n=1)))])
    plan = plan_of(stack=stack, pool=None)
    assert [r.prompt_index for r in plan.rows] == [3, 1, 4] and plan.budget == 9 and stack.extra_prompts == 0


def test_methods_with_rounds_fill_their_batch_themselves():
    plan = plan_of(method(plan=each(lambda r: r.replace(n=1)), rounds=True))
    assert [(r.prompt_index, r.n) for r in plan.rows] == [(3, 1), (1, 1), (4, 1)] and plan.budget == 9


def further(steps, seed=0, stack=None, pool=20):
    """Prompts drawn beyond the host's, step by step."""
    stack = stack or MethodStack([method(plan=each(lambda r: r.replace(n=2)))], seed)
    return [[r.prompt_index for r in plan_of(stack=stack, pool=pool).rows[3:]] for _ in range(steps)], stack


def test_further_prompts_are_a_permutation_that_depends_on_the_seed_alone_and_can_be_resumed():
    drawn, stack = further(10)
    assert drawn == further(10)[0] and drawn != further(10, seed=1)[0]
    first, half = further(4)
    rest = MethodStack([method(plan=each(lambda r: r.replace(n=2)))])
    rest.extra_prompts = half.extra_prompts
    assert first + further(6, stack=rest)[0] == drawn and rest.extra_prompts == stack.extra_prompts
    one_pass = [p for step in drawn for p in step][:17]  # 3, 1 and 4 are in every batch already
    assert sorted(one_pass) == sorted(set(range(20)) - {3, 1, 4})
    assert [p for step in drawn for p in step][17:] != one_pass[:13]  # the second pass has an order of its own
    assert not any({3, 1, 4} & set(step) or len(set(step)) < 3 for step in drawn)
    assert further(1, pool=200)[0] != further(1, pool=201)[0]
    before = np.random.get_state()[1].tolist()
    further(1)
    assert np.random.get_state()[1].tolist() == before


def test_drawing_further_prompts_shuffles_the_dataset_once_and_not_once_per_prompt(monkeypatch):
    made, real = [], np.random.default_rng
    monkeypatch.setattr(np.random, "default_rng", lambda *args: made.append(args) or real(*args))
    plan = plan_of(method(plan=each(lambda r: r.replace(n=1))), proposal=range(64), group_size=4, pool=10_000)
    assert len(plan.rows) == 256 and len(made) == 1


# ---- select_prompts


def test_select_prompts_replaces_the_proposal_and_fills_the_batch():
    pools = []

    def select(pool, n):
        pools.append((pool, n))
        return [i for i in range(pool.size - 1, -1, -1) if i not in pool.taken][:n]

    stack = MethodStack([method(select_prompts=select, plan=each(lambda r: r.replace(n=2)))])
    stack.batch = 4
    plan = first_plan(stack, (3, 1, 4), 4, 12, 20, dataset="the data")
    assert [r.prompt_index for r in plan.rows] == [19, 18, 17, 16, 15, 14] and stack.extra_prompts == 0
    (first, n), (second, m) = pools
    assert (first.size, first.proposal, first.taken, first.dataset, first.batch, n) == (
        20,
        (3, 1, 4),
        (),
        "the data",
        4,
        3,
    )
    assert (second.proposal, second.taken, m) == ((), (19, 18, 17), 3)


@pytest.mark.parametrize("answer", [np.array([5, 6, 7]), torch.tensor([5, 6, 7]), (5, 6, 7), [np.int32(5), 6, 7]])
def test_select_prompts_may_answer_with_any_integers(answer):
    plan = plan_of(method(select_prompts=lambda pool, n: answer))
    assert [r.prompt_index for r in plan.rows] == [5, 6, 7] and all(type(r.prompt_index) is int for r in plan.rows)


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ([1, 2], "3 different prompts of 0..19 were asked for, it gave 2 (2 different): [1, 2]"),
        ([1, 2, 3, 4], "it gave 4 (4 different)"),
        ([1, 2, 2], "it gave 3 (2 different)"),
        ([1, 2, 20], "prompts of 0..19"),
        ([-1, 2, 3], "prompts of 0..19"),
        ([0.0, 1.0, 2.0], "3 dataset rows (integers) are needed, it gave [0.0, 1.0, 2.0]"),
        (torch.tensor([0.0, 1.0, 2.0]), "dataset rows (integers) are needed"),
        (None, "dataset rows (integers) are needed, it gave None"),
        ("abc", "dataset rows (integers) are needed, it gave 'abc'"),
        ([[1], [2], [3]], "dataset rows (integers) are needed"),
        (Exits(), UNREADABLE),
    ],
)
def test_an_illegal_selection_is_refused(answer, why):
    text = refused(lambda: plan_of(method("picky", select_prompts=lambda pool, n: answer)), why)
    assert text.startswith("Method `picky` returned something illegal from `select_prompts`: ")


def test_selecting_a_prompt_that_is_in_the_batch_already_is_refused():
    m = method("again", select_prompts=lambda pool, n: range(n), plan=each(lambda r: r.replace(n=2)))
    refused(lambda: plan_of(m), "`again`", "`select_prompts`", "[0, 1, 2] are in the batch already (`pool.taken`)")


def test_selecting_from_a_stream_is_refused():
    m = method("picky", select_prompts=lambda pool, n: range(n))
    refused(lambda: plan_of(m, pool=None), "`picky` selects prompts, and the dataset is a stream", "random access")


@pytest.mark.parametrize(("proposal", "pool"), [((3, 1, 4), 2), ((), 2), (range(4), 3)])
def test_more_prompts_than_the_dataset_has_are_refused_before_a_method_is_asked(proposal, pool):
    asked = []
    m = method("picky", select_prompts=lambda pool, n: asked.append(n))
    n = len(proposal) or 3
    refused(
        lambda: plan_of(m, proposal=proposal, budget=4 * n, pool=pool),
        f"`picky` is to select {n} prompts, and the dataset has only {pool}.",
        "Make the batch smaller",
    )
    assert not asked


def test_all_prompts_of_the_dataset_may_be_selected(caplog):
    """A batch takes them all, and what would fill it is cut to what is left: nothing is asked for twice."""
    asked = []

    def select(pool, n):
        asked.append(n)
        return [i for i in range(pool.size) if i not in pool.taken][:n]

    one_each = method(select_prompts=select, plan=each(lambda r: r.replace(n=1)))
    assert sorted(r.prompt_index for r in plan_of(one_each, pool=3).rows) == [0, 1, 2] and asked == [3]
    warned = [r.message for r in caplog.records]
    assert len(warned) == 1 and "all 3 prompts" in warned[0] and "`m` has nothing to choose from" in warned[0]
    assert sorted(r.prompt_index for r in plan_of(one_each, pool=5).rows) == [0, 1, 2, 3, 4] and asked == [3, 3, 2]
    plan_of(one_each, proposal=(), budget=12, pool=3)  # nothing was proposed, so nothing could have been chosen
    assert len(caplog.records) == 1


# ---- illegal plans

ROW = PlanRow(0, 0, 1)
ILLEGAL_ROWS = [
    (ROW.replace(n=-1), "-1 + 0 rollouts"),
    (ROW.replace(spare=-2), "1 + -2 rollouts"),
    (ROW.replace(given=(Completion((1,)), Completion((2,)))), "1 + 0 rollouts, 2 given"),
    (ROW.replace(given=(Completion(()),)), "a given completion without tokens"),
    (ROW.replace(given=(Completion((1, 2), (-0.5,)),)), "as many log-probs as tokens, or None"),
    (ROW.replace(given=(Completion((1, 2), versions=(3,)),)), "as many `versions` as tokens, or None"),
    (ROW.replace(given=(Completion((1, 2), versions=(3, -1)),)), "`versions` of a given completion must be whole"),
    (ROW.replace(given=(Completion((1, 2), observed=(True,)),)), "as many `observed` as tokens, or None"),
    (ROW.replace(given=(Completion((1, 2), observed=(0, 1)),)), "`observed` of a given completion must be True or Fal"),
    (ROW.replace(given=(Completion((1, 2), observed=(True, True)),)), "was only read, so none is trained"),
    (ROW.replace(given=(Completion((1, 2), rewards=[1.0]),)), "must be finite numbers, or NaN, by name"),
    (ROW.replace(given=(Completion((1, 2), rewards={"a": "b"}),)), "must be finite numbers, or NaN, by name"),
    (ROW.replace(n=1.0), "must be whole numbers"),
    (ROW.replace(n=torch.tensor(2)), "must be whole numbers"),
    (ROW.replace(group="a"), "must be whole numbers"),
    (ROW.replace(prompt_index=20), "prompt 20 of a dataset of 20 rows"),
    (ROW.replace(prompt_index=-2, edit={"prompt": "x"}), "prompt -2 of a dataset"),
    (ROW.replace(prompt_index=-1), "a foreign prompt (-1) without columns in `edit`"),
    (ROW.replace(max_tokens=0), "max_tokens=0"),
    (ROW.replace(max_turns=0), "max_turns=0"),
    (ROW.replace(max_turns=1.5), "max_turns=1.5"),
    (ROW.replace(given=(Completion((1, 2), prompt=()),)), "a given completion with an empty `prompt`"),
    (ROW.replace(given=(Completion((1, 2), prompt=(-1,)),)), "the `prompt` of a given completion"),
    (ROW.replace(given=(Completion((1, 2), turns=((0, 1),)),)), "must be a tuple of Turn"),
    (ROW.replace(given=(Completion((1, 2), turns=(Turn(0, 3),)),)), "in order and within its 2 tokens"),
    (ROW.replace(given=(Completion((1, 2), turns=(Turn(1, 2), Turn(0, 1))),)), "in order and within its 2 tokens"),
    ((0, 0, 1), "tuple instead of a PlanRow"),
    (None, "NoneType instead of a PlanRow"),
]


@pytest.mark.parametrize(("row", "why"), ILLEGAL_ROWS, ids=[w for _, w in ILLEGAL_ROWS])
def test_an_illegal_row_is_refused_with_the_method_the_hook_and_the_row(row, why):
    m = method("odd", plan=lambda plan: plan.replace(rows=(*plan.rows[:1], row)))
    text = refused(lambda: plan_of(method("fine", plan=lambda plan: plan), m), why)
    assert text.startswith("Method `odd` returned something illegal from `plan`: ")


def test_what_is_no_plan_is_refused():
    unreadable = method("odd", plan=lambda plan: plan.replace(rows=Exits()))
    refused(lambda: plan_of(unreadable), f"Method `odd` returned something illegal from `plan`: {UNREADABLE}")
    for answer, name in (([], "list"), ((PlanRow(0, 0, 1),), "tuple"), (True, "bool")):
        refused(lambda a=answer: plan_of(method("odd", plan=lambda plan: a)), "`odd`", "`plan`", f"{name} instead of a")


def test_legal_rows_of_every_kind_pass():
    rows = (
        PlanRow(0, 0, 2, given=(Completion((1, 2), (-0.1, -0.2)), Completion((3,)))),
        PlanRow(-1, 7, 1, spare=1, edit={"prompt": "another"}, prefix=(5,), max_tokens=1, payload={"x": 1}),
        PlanRow(np.int64(2), 0, np.int64(1)),
    )
    plan = plan_of(method(plan=lambda plan: plan.replace(rows=[*rows, ROW.replace(n=0)])), pool=None)
    assert plan.rows == rows and plan.trained == 4


def test_more_rows_to_train_than_the_batch_holds_is_an_error_that_prints_the_plan():
    m = method(plan=each(lambda r: r.replace(n=5, spare=1)))
    refused(
        lambda: plan_of(m),
        "The plan trains 15 rows, the batch takes 12.",
        "Plan (trained+spare): prompt 3: 5+1, prompt 1: 5+1, prompt 4: 5+1.",
        "Rollouts beyond the batch must be `spare`, or the batch larger.",
    )
    many = refused(lambda: plan_of(method(plan=each(lambda r: r.replace(n=2))), proposal=range(20), group_size=1))
    assert many.count("prompt ") == 16 and ", .." in many


def test_token_ids_of_a_prefix_are_of_the_vocabulary_if_it_is_known():
    for vocabulary, legal in ((None, True), (6, True), (5, False)):
        stack = MethodStack([method("odd", plan=each(lambda r: r.replace(prefix=(5,))))])
        stack.vocabulary = vocabulary
        if legal:
            assert plan_of(stack=stack).rows[0].prefix == (5,)
        else:
            refused(lambda stack=stack: plan_of(stack=stack), "`odd`", "`plan`", "5")


# ---- evaluation, and what adapters do with a plan


def test_a_plan_of_an_evaluation_edits_prompts_and_attaches_payloads():
    rows = [PlanRow(-1, i, 2 + i, edit={"prompt": f"p{i}", "x": i}) for i in range(2)]
    seen = []

    def edited(plan):
        seen.append((plan.group_size, plan.budget, plan.batch, plan.rows))
        return plan.replace(
            rows=tuple(r.replace(edit={"prompt": r.edit["prompt"] + "!"}, payload=1) for r in plan.rows)
        )

    in_eval = {"plan": edited, "in_eval": ("plan",)}
    stack = MethodStack([method("a", **in_eval), method("b", plan=each(lambda r: None)), method("c", **in_eval)])
    stack.batch = 7
    found = evaluation_plan(stack, rows)
    assert [(r.edit, r.payload) for r in found] == [({"prompt": f"p{i}!!", "x": i}, 1) for i in range(2)]
    assert seen[0] == (3, 5, 7, tuple(rows)) and seen[1][3][0].edit == {"prompt": "p0!", "x": 0}
    assert evaluation_plan(stack, []) == [] and evaluation_plan(MethodStack([]), rows) == rows


@pytest.mark.parametrize("program", [False, True])
def test_more_than_edits_is_refused_in_evaluation_but_limits_of_a_rollout_program(program):
    rows = [PlanRow(-1, 0, 2, edit={"prompt": "p"}), PlanRow(-1, 1, 2, edit={"prompt": "q"})]
    limits = [{"prefix": (3,)}, {"max_tokens": 4}, {"max_turns": 2}]
    others = [{"n": 3}, {"spare": 1}, {"redundant": 1}, {"group": 9}, {"prompt_index": 0}]
    others.append({"given": (Completion((1,)),)})
    acts = {"needs": {"turn_limits", "redundancy"}} | ({"rollout": lambda prompt: None} if program else {})
    for change in limits + others:
        m = method("m", plan=each(lambda r, change=change: r.replace(**change)), in_eval=("plan", "rollout"), **acts)
        plan = lambda m=m: evaluation_plan(MethodStack([m]), rows)
        if program and change in limits:
            assert plan() == [r.replace(**change) for r in rows]
        else:
            refused(plan, "Method `m`", "`plan`", "In evaluation")


def test_a_prefix_leaves_room_for_a_token_and_given_completions_fit():
    row = PlanRow(4, 0, 2, prefix=(1, 2, 3))
    check_length(row, 4)
    check_length(PlanRow(4, 0, 2, given=(Completion((1, 2)), Completion((1,)))), 2)
    with pytest.raises(MethodError, match="prompt 4 a prefix of 3 .* up to 0 tokens; the completion length is 3."):
        check_length(row, 3)
    with pytest.raises(MethodError, match="the completion length is 3."):
        check_length(row.replace(max_tokens=3), 8)
    check_length(row.replace(max_tokens=9), 4)
    with pytest.raises(MethodError, match="up to 2 tokens; the completion length is 1."):
        check_length(PlanRow(4, 0, 2, given=(Completion((1,)), Completion((1, 2)))), 1)


def test_ranks_get_whole_rows_in_order_with_about_equally_many_rollouts():
    rows = [PlanRow(i, i, n, spare=spare) for i, (n, spare) in enumerate([(2, 0), (1, 1), (6, 2), (1, 0), (0, 3)])]
    shares = [[[r.prompt_index for r in share] for share in split_plan(rows, ranks)] for ranks in (1, 2, 3, 7)]
    assert shares[:3] == [[[0, 1, 2, 3, 4]], [[0, 1], [2, 3, 4]], [[0, 1], [2], [3, 4]]]
    assert shares[3] == [[0], [1], [], [2], [], [3], [4]]
    assert split_plan([], 2) == [[], []] and split_plan([PlanRow(3, 0, 0)], 1) == [[PlanRow(3, 0, 0)]]


# ---- later rounds


def test_later_rounds_ask_only_methods_with_rounds():
    row = PlanRow(3, 0, 1)
    so_far = (GroupSoFar(row, torch.tensor([1.0])),)
    given = Plan((), 4, 5, round=1, so_far=so_far, batch=3)
    seen = []

    def more(plan):
        seen.append(plan)
        return plan.replace(rows=tuple(g.row.replace(n=2) for g in plan.so_far if g.rewards.max() > 0))

    rounds = method("rounds", plan=more, rounds=True)
    once = method("once", plan=lambda plan: plan.replace(rows=(*plan.rows, PlanRow(9, 9, 1))))
    assert next_plan(MethodStack([once, rounds]), given).rows == (row.replace(n=2),)
    assert seen == [given]
    silent = method("silent", plan=lambda plan: None, rounds=True)
    assert next_plan(MethodStack([silent, once]), given).rows == ()
    nothing = method("nothing", plan=lambda plan: plan.replace(rows=(row.replace(n=0),)), rounds=True)
    assert next_plan(MethodStack([nothing]), given).rows == ()


def test_a_later_round_asks_for_prompts_of_the_dataset():
    m = method("m", rounds=True, plan=lambda plan: plan.replace(rows=(PlanRow(20, 0, 1),)))
    asked = Plan((), 4, 5, round=1)
    assert next_plan(MethodStack([m]), asked, 21).rows == (PlanRow(20, 0, 1),)
    refused(lambda: next_plan(MethodStack([m]), asked, 20), "`m`", "prompt 20 of a dataset of 20 rows")


def test_a_later_round_may_not_exceed_the_rest_of_the_budget():
    greedy = method("greedy", plan=lambda plan: plan.replace(rows=(PlanRow(0, 0, 6),)), rounds=True)
    refused(lambda: next_plan(MethodStack([greedy]), Plan((), 4, 5, round=1)), "trains 6 rows, the batch takes 5")
    spare = method("spare", plan=lambda plan: plan.replace(rows=(PlanRow(0, 0, 5, spare=6),)), rounds=True)
    assert next_plan(MethodStack([spare]), Plan((), 4, 5, round=1)).generated == 11


# ---- what mutants showed was not asked


def test_every_plan_since_the_last_decisions_is_counted():
    """Random numbers depend on it: two plans made before one decision draw different ones."""
    stack = MethodStack([method()])
    drawn = []
    for k in (1, 2, 3):
        plan_of(stack=stack)
        drawn.append(stack.rng("m", "which").random())
        assert stack.draw == k
    assert len(set(drawn)) == 3


def test_prompts_that_do_not_fit_leave_from_the_end():
    """Three further prompts of 3, 2 and 4 rollouts, and room for five."""
    sizes = iter([3, 2, 4])
    plan = plan_of(
        method(plan=each(lambda r: r.replace(n=1 if r.prompt_index in (3, 1, 4) else next(sizes)))), budget=8, pool=6
    )
    assert [r.n for r in plan.rows] == [1, 1, 1, 3, 2] and plan.budget == 0


def test_a_prompt_that_a_plan_put_in_is_not_drawn_again():
    m = method(plan=each(lambda r: r.replace(prompt_index=0 if r.prompt_index == 3 else r.prompt_index, n=1)))
    plan = plan_of(m, pool=8)
    prompts = [r.prompt_index for r in plan.rows]
    assert prompts[:3] == [0, 1, 4] and sorted(prompts) == [0, 1, 2, 4, 5, 6, 7]  # 3 was the host's proposal


def test_one_prompt_may_be_all_that_is_missing():
    plan = plan_of(method(plan=each(lambda r: r.replace(n=4 if r.prompt_index != 4 else 1))), budget=12)
    assert len(plan.rows) == 3 and plan.budget == 3  # a prompt of 3 on average does not fit
    plan = plan_of(method(plan=each(lambda r: r.replace(n=3 if r.prompt_index in (3, 1, 4) else 2))), budget=12)
    assert [r.n for r in plan.rows] == [3, 3, 3, 2] and plan.budget == 1


def test_further_prompts_are_selected_from_the_same_dataset():
    pools = []

    def select(pool, n):
        pools.append(pool)
        return [i for i in range(pool.size) if i not in pool.taken][:n]

    stack = MethodStack([method(select_prompts=select, plan=each(lambda r: r.replace(n=2)))])
    first_plan(stack, (3, 1), 4, 8, 20, dataset="the data")
    assert [pool.dataset for pool in pools] == ["the data"] * 2


def test_an_error_names_the_methods_that_planned():
    nothing = method("nothing", plan=lambda plan: plan.replace(rows=()))
    refused(lambda: plan_of(method("fine", plan=lambda plan: plan), nothing), "The plan of `fine`, `nothing` asks for")
    refused(lambda: plan_of(proposal=(), budget=8, pool=None), "asks for no rollout at all")


def test_an_illegal_row_of_a_stream_is_refused():
    m = method(plan=each(lambda r: r.replace(prompt_index=-2)))
    refused(lambda: plan_of(m, pool=None), "prompt -2 of a dataset of unknown rows")


@pytest.mark.parametrize(("n", "spare"), [(2, -1), (-1, 2)])
def test_neither_number_of_rollouts_may_be_negative(n, spare):
    refused(lambda: plan_of(method(plan=each(lambda r: r.replace(n=n, spare=spare)))), f"{n} + {spare} rollouts")


def test_a_plan_that_is_too_large_is_printed_without_empty_parts():
    text = refused(lambda: plan_of(method(plan=each(lambda r: r.replace(n=5)))))
    assert "Plan (trained+spare): prompt 3: 5, prompt 1: 5, prompt 4: 5. Rollouts beyond" in text


def test_twenty_prompts_that_are_selected_twice_are_named():
    m = method(select_prompts=lambda pool, n: range(n), plan=each(lambda r: r.replace(n=1)))
    text = refused(lambda: plan_of(m, proposal=range(25), group_size=2, pool=50), "are in the batch already")
    assert "18, 19] are" in text and "20" not in text.partition("the prompts ")[2]


# ---- rollouts of several rows


def test_where_a_rollout_becomes_k_rows_the_batch_holds_a_kth_of_the_prompts():
    stack = MethodStack([method(rows_per_rollout=2)])
    plan = plan_of(stack=stack, proposal=(3, 1, 4, 5), group_size=3)
    assert [r.n for r in plan.rows] == [3, 3] and plan.budget == 0 and stack.extra_prompts == 2
    (one,) = plan_of(method(rows_per_rollout=3), proposal=(3, 1, 4, 5), group_size=3).rows
    assert one.n == 3 and one.group == 0
    prompts = [p for _ in range(10) for p in (r.prompt_index for r in plan_of(stack=stack, budget=12).rows)]
    assert len(prompts) == 10  # one group of 4 of 6 rollouts


def test_a_stream_gives_its_first_prompts_to_rollouts_of_several_rows():
    plan = plan_of(method(rows_per_rollout=2), proposal=(3, 1, 4, 5, 6), group_size=2, pool=None)
    assert [r.prompt_index for r in plan.rows] == [3, 1] and plan.budget == 1  # 5 rollouts, groups of 2


def test_a_batch_too_small_for_one_group_of_rollouts_of_several_rows_is_refused():
    methods = method("small", rows_per_rollout=2), method("large", rows_per_rollout=4), method("tiny")
    refused(
        lambda: plan_of(*methods, proposal=(3, 1, 4), group_size=4),
        "`large` makes up to 4 rows of a rollout, so a group of 4 rollouts needs 16 rows, and the batch holds 12.",
    )
    assert plan_of(*methods, proposal=(3, 1, 4, 5), group_size=4).trained == 4  # exactly one group


def test_a_prompt_comes_once_even_where_a_pass_over_the_dataset_ends_inside_of_a_batch():
    for seed in range(6):
        stack = MethodStack([method(rows_per_rollout=2)], seed)
        stack.extra_prompts = 3
        plan = plan_of(stack=stack, proposal=range(8), group_size=1, pool=5)
        assert len({r.prompt_index for r in plan.rows}) == len(plan.rows) == 4
    plan = plan_of(method(rows_per_rollout=2), proposal=range(16), group_size=1, pool=5)
    assert sorted(r.prompt_index for r in plan.rows) == [0, 1, 2, 3, 4]  # there are no more


# ---- new groups beside those that wait


def waiting(*prompts):
    return [{"row": {"prompt_index": p}} for p in prompts]


def test_plan_hooks_see_new_groups_as_a_plan_of_their_own_size():
    seen = []
    stack = MethodStack([method(plan=seen.append)])
    stack.batch, stack.carried = 4, waiting(2)
    for k in (1, 2):
        rows = admitted_prompts(stack, (3, 1), 3, 4, 20, None)
        assert stack.draw == k and len(rows) == 3
    assert all(plan == Plan(plan.rows, 4, 12, round=0, batch=4) for plan in seen) and len(seen) == 2
    assert tuple(rows) == seen[1].rows and all(r.prompt_index != 2 for r in rows)


def test_only_prompts_that_do_not_wait_are_selected():
    asked = []

    def select(pool, n):
        asked.append((pool.taken, n))
        return [i for i in range(pool.size) if i not in pool.taken][:n]

    stack = MethodStack([method(select_prompts=select)])
    stack.carried = waiting(0, 3, -1)  # one of a prompt that is not in the dataset
    assert [r.prompt_index for r in admitted_prompts(stack, (3, 1), 6, 4, 5, None)] == [1, 2, 4]
    assert asked == [((0, 3), 3)]


def test_a_new_group_of_a_prompt_beyond_the_dataset_is_refused():
    stack = MethodStack([method("odd", plan=each(lambda r: r.replace(prompt_index=20)))])
    refused(lambda: admitted_prompts(stack, (3, 1), 2, 4, 20, None), "`odd`", "prompt 20 of a dataset of 20 rows")


def test_rewards_of_a_given_completion_are_of_functions_of_the_run():
    row = PlanRow(4, 0, 2, given=(Completion((1,), rewards={"score": math.nan}),))
    check_rewards(row, ("score", "length"))
    with pytest.raises(MethodError, match="prompt 4 a reward `score`; the reward functions are length, format."):
        check_rewards(row, ("length", "format"))


def test_a_given_completion_is_not_newer_than_the_weights_there_are():
    row = PlanRow(4, 0, 2, given=(Completion((1, 2), versions=(3, 5)), Completion((1,))))
    check_versions(row, 5)
    with pytest.raises(MethodError, match="prompt 4 made by the weights 5, and the newest published ones are 4"):
        check_versions(row, 4)


def test_log_probs_of_tokens_that_were_only_read_are_not_read():
    given = Completion((1, 2), (math.nan, -0.5), observed=(True, False))
    m = method(plan=lambda plan: plan.replace(rows=(plan.rows[0].replace(given=(given,)), *plan.rows[1:])))
    assert first_plan(MethodStack([m]), [3], 2, 2, 10).rows[0].given == (given,)
