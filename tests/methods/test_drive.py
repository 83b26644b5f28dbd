"""DRIVE (arXiv 2511.06307): phases, nested sets, plans of fewer prompts and more rollouts, resume, and the driver."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden, plain
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Completion, Plan, PlanRow, PromptPool
from rl_plugins.methods.drive import Drive
from rl_plugins.runtime.card_file import card_file
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

GOLDEN = Golden("drive")
NAN = math.nan
SIZE = 16
MOE = 70  # steps of the paper's large model


def drive(size: int = SIZE, seed: int = 0, **params: Any) -> tuple[MethodStack, Drive]:
    method = Drive(build_params(Drive.Params, params, "drive"))
    return start_stack(method, seed=seed, run=make_run(dataset_size=size)), method


def batch(stack: MethodStack, method: Any, rate: Any, rows: int = 16, size: int = SIZE, seed: int = 0) -> list[PlanRow]:
    """Plans, samples and observes one batch; prompt i is right with the probability rate[i]."""
    number = stack.batch
    proposal = [(number * rows // 4 + i) % size for i in range(rows // 4)]
    plan = first_plan(stack, proposal, 4, rows, size)
    group = [row.group for row in plan.rows for _ in range(row.n)]
    prompt = [row.prompt_index for row in plan.rows for _ in range(row.n)]
    rng = np.random.default_rng([seed, number])
    rewards = [float(rng.random() < rate[i]) for i in prompt]
    one_step(stack, make_rollouts(rewards, group, prompt_index=prompt, batch=number))
    return list(plan.rows)


def members_of(method: Drive) -> list[int]:
    """The set of the phase, ascending."""
    found: list[int] = method._set.at(np.arange(len(method._set))).tolist()
    return found


# ---- the paper's figures


@GOLDEN.kind(expected=("steps",))
def check_settings(case: Case) -> None:
    """The card has the paper's settings, and the method makes its phases of them. The limit of tokens is the paper's
    whole sequence; here it is of the completion."""
    names = ("prompts", "steps", "rollouts", "total_tokens", "stage2_pool")
    wanted = {name: plain(case.expected[name]) for name in names}
    known = [s for s in card_file("drive").paper_params.values() if s["rollouts"] == wanted["rollouts"]]
    (settings_,) = [s for s in known if list(s["batches"]) == wanted["steps"][:-1]]
    assert list(settings_["max_tokens"]) == wanted["total_tokens"]
    method = Drive(build_params(Drive.Params, settings_, "drive"))
    assert method._sizes(wanted["prompts"][0]) == wanted["prompts"]
    assert f" {wanted['prompts'][0] / 1000:g}k prompts first" in " ".join(card_file("drive").disagreements)
    assert method.stages() == list(itertools.accumulate(wanted["steps"][:-1]))
    total = card_file("drive").paper_settings["trl"]["max_steps"]
    assert wanted["steps"][-1] == total - sum(wanted["steps"][:-1]) or sum(wanted["steps"]) == MOE
    assert Drive()._sizes(wanted["stage2_pool"]) == [175, *wanted["prompts"][1:]], "the default is a share of the pool"


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


# ---- the filter


def hardest_by_hand(
    members: list[int], right: list[float], trials: list[float], gains: list[float], size: int, keep: bool
) -> list[int]:
    """The same by a loop: the worst is taken again and again."""
    left = [(r / t if t else -1.0, g, i) for i, r, t, g in zip(members, right, trials, gains, strict=True)]
    if not keep:
        solvable = [x for x, r, t in zip(left, right, trials, strict=True) if r > 0 or t == 0]
        left = solvable or left
    kept = []
    while left and len(kept) < size:
        worst = min(left)
        left.remove(worst)
        kept.append(worst[2])
    return sorted(kept)


def kept(members: list[int], right: Any, trials: Any, gains: Any, size: int, keep: bool) -> list[int]:
    """The set of that size, made of these prompts of a dataset of 100."""
    _, method = drive(100, keep_unsolved=keep)
    for name, values in (("right", right), ("trials", trials), ("gains", gains)):
        method.state[name][members] = torch.tensor(values, dtype=torch.float64)
    others = sorted(set(range(100)) - set(members))
    method.state["set"] = method._set.toggled(torch.tensor(others, dtype=torch.int64)).edges
    method._keep(size)
    return members_of(method)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_kept_are_the_hardest(data: st.DataObject) -> None:
    n = data.draw(st.integers(1, 12))
    members = sorted(data.draw(st.lists(st.integers(0, 99), min_size=n, max_size=n, unique=True)))
    trials = data.draw(st.lists(st.sampled_from([0.0, 1.0, 4.0]), min_size=n, max_size=n))
    right = [t * data.draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])) for t in trials]
    gains = [min(t, data.draw(st.sampled_from([0.0, 0.5, 1.0]))) for t in trials]
    size, keep = data.draw(st.integers(1, n)), data.draw(st.booleans())
    found = kept(members, right, trials, gains, size, keep)
    assert found == hardest_by_hand(members, right, trials, gains, size, keep)
    assert set(found) <= set(members) and (len(found) == size or not keep)


def test_ties_and_unsolved() -> None:
    members = [2, 4, 6, 8]
    assert kept(members, [1, 1, 1, 1], [2, 2, 2, 2], [1, 0, 0.5, 0], 2, True) == [4, 8]
    assert kept(members, [0, 0, 1, 2], [4, 4, 4, 4], [0, 0, 0, 0], 2, True) == [2, 4]
    assert kept(members, [0, 0, 1, 2], [4, 4, 4, 4], [0, 0, 0, 0], 3, False) == [6, 8]
    assert kept(members, [0, 0, 1, 2], [4, 0, 4, 4], [0, 0, 0, 0], 2, False) == [4, 6]
    assert kept(members, [0, 0, 0, 0], [4, 4, 4, 4], [0, 0, 0, 0], 2, False) == [2, 4]


def test_estimates_are_those_of_a_loop() -> None:
    """Five batches with two groups of one prompt, unscored rollouts and foreign prompts, against float64 loops."""
    stack, method = drive(decay=0.4, success_threshold=0.3, sizes=[1], batches=[])
    right, trials, gains = [0.0] * SIZE, [0.0] * SIZE, [0.0] * SIZE
    for number in range(5):
        rng = np.random.default_rng(number)
        prompts = np.repeat(rng.choice([-1, 0, 1, 2, 3, 3], 6), 4)
        rewards = np.where(rng.random(24) < 0.2, NAN, rng.random(24))
        rollouts = make_rollouts(rewards, prompt_index=prompts.tolist(), batch=number)
        one_step(stack, rollouts)
        for i in sorted(set(prompts.tolist()) - {-1}):
            own = [x for x, p in zip(rewards, prompts, strict=True) if p == i and not math.isnan(x)]
            if own:
                solved = sum(x >= 0.3 for x in own)
                gain = trials[i] > 0 and solved / len(own) > right[i] / trials[i]
                right[i], trials[i] = 0.4 * right[i] + solved, 0.4 * trials[i] + len(own)
                gains[i] = 0.4 * gains[i] + gain
        logged = combine([stack.metrics.take()])
        known = [x for x, p in zip(rewards, prompts, strict=True) if p >= 0]
        scored = [x for x in known if not math.isnan(x)]
        assert logged["drive/unscored"] == pytest.approx(1 - len(scored) / len(known))
        assert logged["drive/success"] == pytest.approx(sum(x >= 0.3 for x in scored) / len(scored))
    for name, wanted in (("right", right), ("trials", trials), ("gains", gains)):
        assert method.state[name].tolist() == pytest.approx(wanted)
    assert max(gains) > 0


def test_a_rollout_of_several_rows_counts_once() -> None:
    stack, method = drive()
    rollout, index = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 1, 2, 0])
    rollouts = make_rollouts([1.0, 1, 1, 0], [0] * 4, rollout=rollout, index=index)
    one_step(stack, rollouts)
    assert (float(method.state["right"][0]), float(method.state["trials"][0])) == (1.0, 2.0)


# ---- phases


def test_phases_end_where_they_should_and_sets_are_nested() -> None:
    params = {"sizes": [1, 8, 0.25, 2], "batches": [4, 3, 2], "rollouts": [4, 8, 8, 16], "max_tokens": [6, 12, 12, 12]}
    stack, method = drive(**params)
    rate = np.repeat([1.0, 0.0], 8)
    sets, logged = [], []
    for number in range(12):
        rows = batch(stack, method, rate)
        phase = sum(number >= end for end in (4, 7, 9))
        n, limit = (4, 8, 8, 16)[phase], (6, 12, 12, 12)[phase]
        assert {row.n for row in rows} == {n} and {row.max_tokens for row in rows} == {limit}
        assert len(rows) == 16 // n and len({row.group for row in rows}) == len(rows)
        members = set(members_of(method))
        assert {row.prompt_index for row in rows} <= members
        sets.append(members)
        values = combine([stack.metrics.take()])
        assert values["drive/phase"] == phase and values["drive/set"] == len(members) == (16, 8, 4, 2)[phase]
        assert values["drive/stage"] == (0, 1, 1, 2)[phase] and values["drive/outside"] == 0
        logged.append(values)
    assert all(later <= earlier for earlier, later in itertools.pairwise(sets))
    assert [number for number, v in enumerate(logged) if "drive/kept_rate" in v] == [4, 7, 9]
    assert logged[4]["drive/unseen"] == 0
    assert sets[4] == set(range(8, 16))  # every prompt was seen once


def test_the_kept_set_is_that_of_the_estimates() -> None:
    stack, method = drive(sizes=[1, 0.5, 0.25], batches=[3, 3])
    rate = np.random.default_rng(3).random(SIZE)
    for number in range(8):
        before = [method.state[k].clone() for k in ("right", "trials", "gains")]
        members = members_of(method)
        batch(stack, method, rate)
        if number in (3, 6):
            of = [[float(x[i]) for i in members] for x in before]
            assert members_of(method) == hardest_by_hand(members, *of, 8 if number == 3 else 4, True)


def test_unseen_prompts_are_kept_as_the_hardest() -> None:
    stack, method = drive(sizes=[1, 0.75], batches=[1])
    batch(stack, method, np.ones(SIZE))  # prompts 0 to 3 are solved
    batch(stack, method, np.ones(SIZE))
    assert members_of(method) == list(range(4, 16))
    assert combine([stack.metrics.take()])["drive/unseen"] == 1


def test_all_prompts_of_a_set_come_before_one_comes_again() -> None:
    stack, method = drive(sizes=[0.75], batches=[])
    seen = [row.prompt_index for _ in range(6) for row in batch(stack, method, np.zeros(SIZE))]
    for start in (0, 12):
        assert sorted(seen[start : start + 12]) == members_of(method)
    assert seen[:12] != seen[12:]  # shuffled anew


def test_prompts_of_few_large_groups_take_turns() -> None:
    """A batch that holds one group of the four prompts that were selected moves on by one."""
    stack, method = drive(sizes=[0.5], batches=[], rollouts=[16])
    seen = [row.prompt_index for _ in range(8) for row in batch(stack, method, np.zeros(SIZE))]
    assert sorted(seen) == members_of(method)


def test_more_and_smaller_groups_than_the_host() -> None:
    for sizes in ([1.0], [0.9]):
        stack, method = drive(sizes=sizes, batches=[], rollouts=[2])
        for _ in range(3):
            rows = batch(stack, method, np.zeros(SIZE))
            assert [row.n for row in rows] == [2] * 8 and len({row.prompt_index for row in rows}) == 8


@pytest.mark.parametrize(("when_short", "groups"), [("repeat", 4), ("fewer", 3)])
def test_a_set_smaller_than_the_batch(when_short: str, groups: int) -> None:
    stack, method = drive(sizes=[3], batches=[], when_short=when_short)
    for _ in range(3):
        rows = batch(stack, method, np.zeros(SIZE))
        assert len(rows) == groups == len({row.group for row in rows})
        assert {row.prompt_index for row in rows} == set(members_of(method)) and {r.n for r in rows} == {4}
        assert combine([stack.metrics.take()])["drive/repeated"] == groups - 3


def test_a_batch_larger_than_the_dataset() -> None:
    stack, method = drive(size=4, sizes=[1], batches=[], rollouts=[2])
    rows = batch(stack, method, np.zeros(4), rows=16, size=4)
    assert [row.n for row in rows] == [2] * 8 and sorted(r.prompt_index for r in rows) == sorted([0, 1, 2, 3] * 2)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_no_plan_is_too_large_or_empty(data: st.DataObject) -> None:
    first = data.draw(st.integers(1, SIZE))
    second = data.draw(st.integers(1, first))
    n = data.draw(st.lists(st.integers(2, 8), min_size=2, max_size=2))
    short = data.draw(st.sampled_from(["repeat", "fewer"]))
    sizes = [1.0 if first == SIZE else max(2, first), max(2, second)]
    params = {"sizes": sizes, "batches": [2], "rollouts": n, "when_short": short}
    stack, method = drive(**params, keep_unsolved=data.draw(st.booleans()))
    for number in range(4):
        rows = batch(stack, method, np.full(SIZE, 0.3))
        size = n[number >= 2]
        trained = sum(row.n for row in rows)
        assert 0 < trained <= 16 and {row.n for row in rows} == {size}
        if short == "repeat":
            assert len(rows) == 16 // size


# ---- neutral


def test_one_stage_with_all_prompts_is_the_host() -> None:
    stack, method = drive(sizes=[1], batches=[])
    plain = start_stack()
    for number in range(6):
        proposal = [(4 * number + i) % SIZE for i in range(4)]
        assert first_plan(stack, proposal, 4, 16, SIZE) == first_plan(plain, proposal, 4, 16, SIZE)
        rollouts = make_rollouts(np.random.default_rng(number).random(16), prompt_index=np.repeat(proposal, 4))
        decided, wanted = one_step(stack, rollouts), one_step(plain, rollouts)
        assert decided.row_advantages is not None and wanted.row_advantages is not None
        assert decided.row_advantages.tolist() == wanted.row_advantages.tolist()


def test_rows_of_others_stay_as_planned() -> None:
    stack, method = drive(sizes=[4], batches=[], max_tokens=[9])
    stack.call("select_prompts", method, PromptPool(SIZE, (), (), None, 0), 2)
    first, second = method._next(2, ())
    stranger = next(i for i in range(SIZE) if i not in members_of(method))
    rows = (
        PlanRow(first, 0, 4, spare=1, edit={"prompt": "x"}, payload="p", max_tokens=5),
        PlanRow(stranger, 1, 4),
        PlanRow(second, 2, 4, given=(Completion((1,)),)),
        PlanRow(-1, 3, 4, edit={"prompt": "y"}),
    )
    plan = method.plan(Plan(rows, 4, 16))
    assert plan is not None
    assert plan.rows[:3] == (rows[2], rows[3], rows[0])  # a shorter limit stays
    assert len(plan.rows) == 4 and plan.rows[3].group == 4 and plan.rows[3].max_tokens == 9
    assert plan.rows[3].prompt_index in members_of(method)


# ---- state


@pytest.mark.parametrize("at", [1, 3, 5, 6])
def test_resume_in_the_middle_of_a_phase(at: int, tmp_path: Path) -> None:
    params = {"sizes": [1, 0.5, 3], "batches": [3, 3], "rollouts": [4, 8, 8], "max_tokens": [6, 12, 12]}
    rate = np.random.default_rng(0).random(SIZE)
    stack, method = drive(**params)
    for _ in range(at):
        batch(stack, method, rate)
    save_state(tmp_path, stack.state_dict("d"))
    other, twin = drive(**params)
    other.load_state_dict(load_state(tmp_path) or {}, "d")
    for _ in range(8 - at):
        assert batch(stack, method, rate) == batch(other, twin, rate)
    for name in ("right", "trials", "gains", "set"):
        assert torch.equal(method.state[name], twin.state[name])


def test_batches_planned_ahead_show_as_outside() -> None:
    """A batch of the phase before is observed when the next has begun."""
    stack, method = drive(sizes=[1, 4], batches=[1])
    method._enter(1)
    rollouts = make_rollouts([0.0] * 16, prompt_index=np.repeat([0, 1, 2, 9], 4).tolist())  # ties: the set is 0 to 3
    one_step(stack, rollouts)
    assert combine([stack.metrics.take()])["drive/outside"] == 0.25


# ---- refusals


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"sizes": []}, "at least one entry"),
        ({"sizes": [2.5], "batches": []}, "whole number of prompts"),
        ({"sizes": [1, 0.5]}, "`batches` has 3 entries, and `sizes` has 2; give 1"),
        ({"sizes": [1, 0.5], "batches": []}, "`batches` has 0 entries"),
        ({"rollouts": [8, 64]}, "`rollouts` has 2 entries, and `sizes` has 4; give 4"),
        ({"max_tokens": [8]}, "`max_tokens` has 1 entries"),
        ({"sizes": [0.3, 0.4], "batches": [1]}, "`sizes` has 0.4 after 0.3"),
        ({"sizes": [25, 50], "batches": [1]}, "`sizes` has 50 after 25"),
        ({"rollouts": [1, 8, 8, 8]}, "`rollouts`"),
        ({"decay": 1.5}, "`decay` is 1.5"),
    ],
)
def test_parameters_that_cannot_be(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build_params(Drive.Params, params, "drive")
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"sizes": [17], "batches": []}, "asks for 17 prompts, and the dataset has 16"),
        ({"sizes": [0.1, 9], "batches": [1]}, r"comes to \[2, 9\] of 16 prompts"),
        ({"sizes": [1], "batches": [], "max_tokens": [13]}, "completion length is 12"),
    ],
)
def test_what_does_not_fit_the_run(params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        drive(**params)


def test_two_budgets_and_groups_larger_than_a_batch_are_refused() -> None:
    with pytest.raises(ConfigError, match="how many rollouts prompts get"):
        build_stack(["v0", "drive"], {"drive": {"rollouts": [8, 8, 8, 8]}})
    assert not Drive().decides_rollouts
    build_stack(["v0", "drive"], {})  # the filter alone decides no number
    stack, method = drive(sizes=[1, 0.5], batches=[9], rollouts=[4, 32])
    with pytest.raises(MethodError, match="hold no group of 32"):
        batch(stack, method, np.zeros(SIZE))


def test_a_phase_that_is_never_reached_is_told(caplog: Any) -> None:
    method = Drive(Drive.Params(sizes=(1.0, 0.5), batches=(100,)))
    start_stack(method, run=make_run())
    assert "batch 100, and the run has 100: it is not reached" in caplog.text


@pytest.mark.parametrize("size", [5, 6, 7, 16])
def test_all_of_a_set_come_before_one_comes_again(size: int) -> None:
    """Also where a pass ends in the middle of a batch."""
    stack, method = drive(sizes=[size], batches=[])
    dealt = np.zeros(SIZE, dtype=int)
    for _ in range(14):
        rows = batch(stack, method, np.full(SIZE, 0.5))
        np.add.at(dealt, [row.prompt_index for row in rows], 1)
        assert dealt[:size].max() - dealt[:size].min() <= 1 and not dealt[size:].any()
        assert len({row.prompt_index for row in rows}) == 4


@pytest.mark.parametrize("rollouts", [2, 8])
def test_other_numbers_than_the_hosts_still_go_through_the_dataset(rollouts: int) -> None:
    """The prompts that the host proposes are then too few, or not all of them fit."""
    stack, method = drive(sizes=[1], batches=[], rollouts=[rollouts])
    seen = [row.prompt_index for _ in range(SIZE * rollouts // 16) for row in batch(stack, method, np.full(SIZE, 0.5))]
    assert sorted(seen) == list(range(SIZE))
