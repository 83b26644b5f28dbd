"""BestPerm (arXiv 2401.08961): the oracle against exhaustive search, and the cascade of hints through the driver."""

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

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Completion, PlanRow, Rollouts
from rl_plugins.methods.best_perm import BestPerm, best_permutation, upper_bound
from rl_plugins.methods.v0 import V0
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.preflight import HostCapabilities, preflight
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_plan, make_rollouts, make_run, one_step, start_stack

GOLDEN = Golden("best_perm")
NAN = math.nan


# ---- the oracle


def value_of(order: Any, u: Any, w: Any, w_none: float) -> float:
    """f of a list, by the definition."""
    reached, total = 1.0, 0.0
    for i in order:
        total += reached * u[i] * w[i]
        reached *= 1 - u[i]
    return total + reached * w_none


def exhaustive(u: Any, w: Any, m: int, w_none: float) -> float:
    """The largest f of all ordered lists of at most m items."""
    lists = itertools.chain.from_iterable(itertools.permutations(range(len(u)), k) for k in range(min(m, len(u)) + 1))
    return max(value_of(order, u, w, w_none) for order in lists)


@GOLDEN.kind("u")
def check_oracle(case: Case) -> None:
    u, w, none = (case.inputs[name] for name in ("u", "w", "w_none"))
    order, value = best_permutation(u, w, case.params["m"], none)
    assert order == case.expected["order"]
    assert value == pytest.approx(case.expected["value"], abs=1e-9)
    assert value == pytest.approx(value_of(order, u, w, none), abs=1e-12)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


number = st.one_of(st.sampled_from([0.0, 0.3, 0.5, 1.0]), st.floats(0, 1))


@settings(max_examples=60, deadline=None)
@given(
    items=st.lists(st.tuples(number, st.one_of(number, st.floats(-1, 2))), max_size=5),
    m=st.integers(0, 6),
    w_none=st.sampled_from([0.0, 0.3, -0.5, 0.9]),
)
def test_equals_exhaustive_search(items, m, w_none):
    u, w = [a for a, _ in items], [b for _, b in items]
    order, value = best_permutation(u, w, m, w_none)
    assert value == pytest.approx(exhaustive(u, w, m, w_none), abs=1e-12)
    assert value == pytest.approx(value_of(order, u, w, w_none), abs=1e-12)
    assert len(order) <= m and len(set(order)) == len(order)
    assert all(w[i] > w_none for i in order)
    assert [w[i] for i in order] == sorted((w[i] for i in order), reverse=True)
    fewer = best_permutation(u, w, max(0, m - 1), w_none)[1]
    assert value >= fewer - 1e-12


def test_one_item_is_the_best_single_one():
    u, w = [0.9, 0.5, 0.1, 1.0], [0.4, 0.8, 0.9, 0.2]
    assert best_permutation(u, w, 1, 0.3)[0] == [1]  # 0.5 * 0.8 + 0.5 * 0.3 = 0.55, the first 0.39, the third 0.36
    assert best_permutation(u, w, 0, 0.3) == ([], 0.3)
    assert best_permutation(u, [0.3] * 4, 4, 0.3) == ([], 0.3)
    assert best_permutation([], [], 3, 0.5) == ([], 0.5)


def test_of_equal_values_the_likelier_comes_first():
    assert best_permutation([0.2, 0.9, 0.5], [1.0] * 3, 3)[0] == [1, 2, 0]
    assert best_permutation([0.2, 0.9, 0.5], [1.0] * 3, 2)[0] == [1, 2]
    assert best_permutation([0.0, 0.7, 0.5], [1.0, 0.9, 0.8], 3)[0] == [1, 2]  # what is never accepted adds nothing


@pytest.mark.parametrize(
    "given_", [([0.5], [1.0, 2.0], 1), ([1.5], [1.0], 1), ([0.5], [NAN], 1), ([0.5], [1.0], -1), ([NAN], [1.0], 1)]
)
def test_oracle_refuses(given_):
    with pytest.raises(ValueError, match="one finite number per item"):
        best_permutation(*given_)


def test_upper_bound_by_hand():
    assert upper_bound(0, 0, 50) == 1.0
    assert upper_bound(0, 100, 50) == pytest.approx(math.sqrt(1.5 * math.log(50) / 100))
    assert upper_bound(60, 100, 50) == pytest.approx(0.6 + math.sqrt(1.5 * math.log(50) / 100))
    assert upper_bound(9, 10, 50) == 1.0
    assert upper_bound(3, 4, 1) == 0.75


# ---- the cascade


class Table:
    """Prompts as messages, with three hints each, but none for prompt 7."""

    column_names = ["prompt", "hints"]

    def __init__(self, hints: Any = None) -> None:
        self.hints = hints or (lambda i: None if i == 7 else [f"weak {i}", f"strong {i}", f"answer {i}"])

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"prompt": [{"role": "user", "content": f"task {i}"}], "hints": self.hints(i)}


def cascade(dataset: Any = None, group_size: int = 4, seed: int = 0, **params: Any) -> tuple[MethodStack, BestPerm]:
    if "templates" not in params:
        params = {"hints_column": "hints", **params}
    method = BestPerm(build_params(BestPerm.Params, params, "best_perm"))
    run = make_run(dataset=dataset or Table(), dataset_size=8, group_size=group_size)
    return start_stack(method, seed=seed, run=run), method


def generate(
    stack: MethodStack, reward: Any, prompts: Any = (0, 1, 2), group_size: int = 4
) -> tuple[list[list[PlanRow]], Rollouts]:
    """Rounds of one batch; `reward(prompt, hint, number)` of a rollout, hint -1 for a plain one."""
    budget = len(prompts) * group_size
    rows = list(first_plan(stack, prompts, group_size, budget, 8).rows)
    rounds, made = [rows], Rounds(stack, rows, group_size, budget, 8)
    while True:
        flat = [row for row in made.rows for _ in range(row.n + row.spare)]
        group = [row.group for row in flat]
        number = [group[:i].count(g) for i, g in enumerate(group)]
        hint = [row.payload["best_perm"] if row.payload else -1 for row in flat]
        rewards = [reward(r.prompt_index, h, k) for r, h, k in zip(flat, hint, number, strict=True)]
        prompt = [row.prompt_index for row in flat]
        rollouts = make_rollouts(rewards, group, prompt_index=prompt, payload=[row.payload for row in flat])
        more = made.more(rollouts.group, rollouts.reward)
        if not more:
            return rounds, rollouts.replace(batch=stack.batch)
        rounds.append(list(more))


def tried(rounds: list[list[PlanRow]]) -> list[list[tuple[int, int, int]]]:
    """(prompt, hint, rollouts) of the later rounds."""
    return [[(row.prompt_index, row.payload["best_perm"], row.n) for row in rows] for rows in rounds[1:]]


def test_prompts_without_a_success_try_hint_after_hint():
    stack, method = cascade()
    solved_by = {0: -1, 1: 1, 2: 9}  # 0 plainly, 1 by the second hint, 2 by none
    rounds, rollouts = generate(stack, lambda p, h, k: float(h == solved_by[p]))
    assert [(row.n, row.spare, row.edit, row.payload) for row in rounds[0]] == [(2, 0, None, None)] * 3
    assert tried(rounds) == [[(1, 0, 1), (2, 0, 1)], [(1, 1, 1), (2, 1, 1)], [(2, 2, 1)]]
    assert [row.group for row in rounds[1]] == [1, 2]  # they join the group of their prompt
    assert rounds[2][0].edit == {"prompt": [{"role": "user", "content": "task 1\n\nHint: strong 1"}]}
    decision = one_step(stack, rollouts, budget=12)
    assert decision.rollouts.group.tolist() == [0, 0, 1, 1, 2, 2, 1, 2, 1, 2, 2]
    advantages = decision.row_advantages.tolist()
    assert advantages[8] > 0 > advantages[2] and advantages[4] == 0.0  # the estimator compares the whole group
    assert (method.state["accepted"], method.state["rejected"]) == ([0, 1, 0], [2, 1, 1])
    assert method.state["cascades"] == 2
    logged = combine([stack.metrics.take()])
    assert logged["best_perm/plain"] == pytest.approx(1 / 3)
    assert logged["best_perm/hinted"] == pytest.approx(2 / 3)
    assert logged["best_perm/rescued"] == 0.5 and logged["best_perm/tries"] == 2.5


def test_later_hints_are_not_observed():
    stack, method = cascade()
    rounds, rollouts = generate(stack, lambda p, h, k: float(h == 0))
    assert tried(rounds) == [[(0, 0, 1), (1, 0, 1), (2, 0, 1)]]
    one_step(stack, rollouts, budget=12)
    assert (method.state["accepted"], method.state["rejected"]) == ([3], [0])
    assert method._acceptance(3) == [1.0, 1.0, 1.0]
    stack, method = cascade(estimate="posterior")
    method.state.update(accepted=[3], rejected=[0])
    assert method._acceptance(3) == [0.8, 0.5, 0.5]


def test_the_bound_grows_with_the_cascades():
    _, method = cascade()
    method.state.update(accepted=[10, 2], rejected=[90, 98], cascades=60)
    wanted = [0.1 + math.sqrt(1.5 * math.log(61) / 100), 0.02 + math.sqrt(1.5 * math.log(61) / 100), 1.0]
    assert method._acceptance(3) == pytest.approx(wanted)


def test_order_follows_what_was_learned():
    stack, method = cascade(max_hints=2, values=[1.0, 0.9, 0.5], estimate="posterior")
    method.state.update(accepted=[49, 98, 98], rejected=[49, 0, 0])
    assert method.order(3) == best_permutation([0.5, 0.99, 0.99], [1.0, 0.9, 0.5], 2)[0] == [0, 1]
    method.state.update(accepted=[0, 10, 98], rejected=[998, 88, 0])
    assert method.order(3) == [1, 2]
    rounds, _ = generate(stack, lambda p, h, k: 0.0)
    assert [[t[1] for t in r] for r in tried(rounds)] == [[1, 1, 1], [2, 2, 2]]
    assert method.order(1) == [0]


def test_hints_worth_no_more_than_nothing_are_not_tried():
    stack, method = cascade(values=[0.2, 0.8, 0.1], value_none=0.2)
    assert method.order(3) == [1]
    _, method = cascade(value_none=1.0)
    assert method.order(3) == []
    stack, _ = cascade(value_none=1.0)
    rounds, rollouts = generate(stack, lambda p, h, k: 0.0)
    assert len(rounds) == 1
    one_step(stack, rollouts, budget=12)
    assert combine([stack.metrics.take()])["best_perm/hinted"] == 0.0


def test_default_values_fall_evenly():
    _, method = cascade(max_hints=1, estimate="posterior")
    method.state.update(accepted=[5, 9, 8], rejected=[5, 1, 0])  # u = 0.5, 0.83, 0.9; u w = 0.5, 0.56, 0.3
    assert method.order(3) == [1]


def test_room_is_served_in_the_order_of_the_plan():
    stack, _ = cascade(n_first=3, n_hint=2, group_size=4)
    rounds, _ = generate(stack, lambda p, h, k: 0.0)
    assert [row.n for row in rounds[0]] == [3, 3, 3]
    assert tried(rounds) == [[(0, 0, 2), (1, 0, 1)]]  # 3 rows are left
    # a prompt that was answered plainly leaves its room to others
    stack, _ = cascade(n_first=3, n_hint=2)
    rounds, _ = generate(stack, lambda p, h, k: float(p == 0))
    assert tried(rounds) == [[(1, 0, 2), (2, 0, 1)]]


def test_max_hints_and_prompts_with_fewer_hints():
    stack, _ = cascade(max_hints=2)
    rounds, _ = generate(stack, lambda p, h, k: 0.0, prompts=(6, 7))
    assert tried(rounds) == [[(6, 0, 1)], [(6, 1, 1)]]
    ragged = Table(lambda i: [f"{k}" for k in range(i)])
    stack, _ = cascade(ragged, group_size=8, n_first=1, max_hints=5)
    rounds, _ = generate(stack, lambda p, h, k: 0.0, prompts=(0, 1, 3), group_size=8)
    assert [[t[0] for t in r] for r in tried(rounds)] == [[1, 3], [3], [3]]


def test_unscorable_rollouts_are_no_evidence():
    stack, method = cascade()
    rounds, rollouts = generate(stack, lambda p, h, k: NAN if p == 0 or h == 0 or k == 0 else 0.0)
    assert {t[0] for r in tried(rounds) for t in r} == {1, 2}  # 0 has no reward at all
    one_step(stack, rollouts, budget=12)
    assert (method.state["accepted"], method.state["rejected"]) == ([0, 0, 0], [0, 2, 2])
    assert method.state["cascades"] == 2


def test_a_success_is_a_reward_from_the_threshold_on():
    stack, _ = cascade(success_threshold=0.3)
    rounds, rollouts = generate(stack, lambda p, h, k: (0.3 if p == 0 else 0.29) if h < 0 else 0.3)
    assert tried(rounds) == [[(1, 0, 1), (2, 0, 1)]]
    one_step(stack, rollouts, budget=12)
    assert stack.methods[0]._state["accepted"] == [2]


def test_a_try_of_several_rollouts_is_accepted_if_one_of_them_is():
    stack, method = cascade(n_first=2, n_hint=2)
    rounds, rollouts = generate(stack, lambda p, h, k: float(h == 0 and k == 3), prompts=(0, 1))
    assert tried(rounds) == [[(0, 0, 2), (1, 0, 2)]]
    one_step(stack, rollouts, budget=8)
    assert (method.state["accepted"], method.state["rejected"]) == ([2], [0])


def test_a_rollout_of_several_rows_counts_once_before_rewards_hooks():
    stack, method = cascade()
    payload = [None, {"best_perm": 1}, {"best_perm": 1}, {"best_perm": 0}]
    rewards = torch.tensor([[0.0, 9.0], [1.0, 9.0], [0.2, 9.0], [0.4, 9.0]])
    rollouts = make_rollouts(
        rewards,
        [0] * 4,
        weights=[1.0, 0.0],
        payload=payload,
        rollout=torch.tensor([0, 1, 1, 2]),
        index=torch.tensor([0, 0, 1, 0]),
        reward=torch.zeros(4, dtype=torch.float64),
    )
    one_step(stack, rollouts)
    assert (method.state["accepted"], method.state["rejected"]) == ([0, 1], [1, 0])


def test_given_completions_and_rows_without_training_stay():
    stack, method = cascade(n_first=1)
    given_ = PlanRow(5, 0, 4, given=(Completion((1,)),) * 4)
    plan = stack.call("plan", method, make_plan(2, 4).replace(rows=(given_, PlanRow(1, 1, 4, spare=1))))
    assert [(row.n, row.spare) for row in plan.rows] == [(4, 0), (1, 1)]
    rounds = Rounds(stack, [given_, PlanRow(2, 1, 0, spare=2), PlanRow(3, 2, 1)], 4, 12, 8)
    more = rounds.more(torch.tensor([0] * 4 + [1] * 2 + [2]), torch.zeros(7, dtype=torch.float64))
    assert [row.prompt_index for row in more] == [3]


def test_edits_and_payloads_of_others_stay():
    stack, method = cascade()
    row = PlanRow(1, 0, 2, spare=1, edit={"prompt": "other task", "x": 1}, payload={"else": 2})
    (more,) = Rounds(stack, [row], 4, 4, 8).more(torch.tensor([0, 0, 0]), torch.zeros(3, dtype=torch.float64))
    assert (more.n, more.spare) == (1, 0)
    assert more.edit == {"prompt": "other task\n\nHint: weak 1", "x": 1}
    assert more.payload == {"else": 2, "best_perm": 0}


def test_templates():
    stack, method = cascade(templates=("{prompt} {hint}", "First plan. {prompt}"))
    rounds, rollouts = generate(stack, lambda p, h, k: 0.0, prompts=(4,))
    texts = [rows[0].edit["prompt"][0]["content"] for rows in rounds[1:]]
    assert texts == ["task 4 {hint}", "First plan. task 4"]
    one_step(stack, rollouts, budget=4)
    logged = combine([stack.metrics.take()])
    assert logged["best_perm/acceptance/0"] == 1.0 and logged["best_perm/acceptance/1"] == 1.0
    assert method.needs == {"prompt_index"}


def test_a_resumed_run_goes_on_exactly(tmp_path: Path):
    def rewards(p: int, h: int, k: int) -> float:
        return float(np.random.default_rng([p, h + 1, k]).random() < 0.15 + 0.2 * (h + 1))

    whole, method = cascade(group_size=6)
    for _ in range(3):
        one_step(whole, generate(whole, rewards, group_size=6)[1], budget=18)
    save_state(tmp_path, whole.state_dict("x"))
    resumed, other = cascade(group_size=6)
    resumed.load_state_dict(load_state(tmp_path) or {}, "x")
    for stack in (whole, resumed):
        one_step(stack, generate(stack, rewards, (3, 4, 5), 6)[1], budget=18)
    assert dict(method.state) == dict(other.state) and sum(method.state["accepted"]) > 0


def test_the_better_hint_is_tried_first_in_time():
    """Of two hints of equal value the one that is accepted more often comes first after some batches."""
    stack, method = cascade(values=[1.0, 1.0, 1.0], max_hints=3, n_first=1, group_size=4)
    rng = np.random.default_rng(0)
    accept = [0.1, 0.2, 0.8]
    for _ in range(60):
        draw = rng.random((4, 3))
        _, rollouts = generate(stack, lambda p, h, k, d=draw: float(h >= 0 and d[p, h] < accept[h]), (0, 1, 2, 3))
        one_step(stack, rollouts, budget=16)
    assert method.order(3)[0] == 2


# ---- before the run


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({}, "neither `hints_column` and `templates` are given"),
        ({"hints_column": "h", "templates": ["{prompt}"]}, "both `hints_column` and `templates` are given"),
        ({"hints_column": "h", "hint_template": "{hint}"}, r"the template '\{hint\}' lacks \{prompt\}"),
        ({"hints_column": "h", "hint_template": "{prompt}"}, r"lacks \{hint\}"),
        ({"templates": ["{prompt}", "think"]}, r"the template 'think' lacks \{prompt\}"),
        ({"templates": ["{prompt}", "{prompt}!"], "values": [1.0]}, "`values` has 1 numbers for 2 templates"),
    ],
)
def test_parameters_that_cannot_be(params, message):
    with pytest.raises(ConfigError, match=message):
        build_params(BestPerm.Params, params, "best_perm")


def test_what_a_run_must_have():
    with pytest.raises(ConfigError, match="`n_first` is 4, and the run has 4 rollouts per prompt"):
        cascade(n_first=4)
    method = BestPerm(BestPerm.Params(hints_column="hints"))
    for column in ("image", "images", "videos"):
        with pytest.raises(ConfigError, match=f"the prompts have {column}, and rounds under other prompts"):
            start_stack(method, run=make_run(dataset=Table(), columns=("prompt", column)))


def test_a_missing_column_is_found_before_the_run():
    capabilities = HostCapabilities("trl", "0", ("plan", "observe"), {}, (), {}, ("prompt", "hint"), {})
    with pytest.raises(ConfigError, match=r"the dataset has no column `hints` \(it has: hint, prompt\). Add it."):
        preflight(build_stack(["best_perm"], {"best_perm": {"hints_column": "hints"}}), capabilities)


def test_two_methods_that_decide_the_rollouts_are_refused():
    with pytest.raises(ConfigError, match="`v0` and `best_perm`"):
        MethodStack([V0(), BestPerm(BestPerm.Params(hints_column="hints"))])


def test_hints_that_are_none():
    for hints, message in (
        (lambda i: [1, 2], r"The column `hints` of prompt 0 holds \[1, 2\]; it must be a list of texts"),
        (lambda i: ["a"] * 4, "A prompt has 4 hints, and `values` has 3 numbers"),
    ):
        stack, _ = cascade(Table(hints), values=[1.0, 0.5, 0.2])
        with pytest.raises(MethodError, match=message):
            generate(stack, lambda p, h, k: 0.0)
    stack, _ = cascade(Table(lambda i: f"only {i}"))
    rounds, _ = generate(stack, lambda p, h, k: 0.0, prompts=(3,))
    assert [rows[0].edit["prompt"][0]["content"] for rows in rounds[1:]] == ["task 3\n\nHint: only 3"]


def test_a_foreign_prompt_brings_its_hints():
    stack, method = cascade()
    plain = PlanRow(-1, 0, 2, edit={"prompt": "new"})
    rewards = torch.zeros(2, dtype=torch.float64)
    with pytest.raises(MethodError, match="A foreign prompt of the plan has no column `hints`"):
        Rounds(stack, [plain], 4, 4, 8).more(torch.tensor([0, 0]), rewards)
    row = plain.replace(edit={"prompt": "new", "hints": ["look"]})
    (more,) = Rounds(stack, [row], 4, 4, 8).more(torch.tensor([0, 0]), rewards)
    assert more.edit == {"prompt": "new\n\nHint: look", "hints": ["look"]}
