"""`runtime/rounds.py`: the books of a batch that is generated in rounds."""

from __future__ import annotations

import pytest
import torch

from rl_plugins.core.errors import MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import MAX_ROUNDS, PlanRow
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.rounds import Rounds, in_rounds, most_in_rounds
from rl_plugins.runtime.stack import MethodStack, Watcher, build_stack
from rl_plugins.testing import make_run


class Asks(Method):
    """Asks for what `rows` says of the plan so far."""

    name = "asks"
    rounds = True

    def __init__(self, rows):
        super().__init__()
        self.rows, self.plans = rows, []

    def plan(self, plan):
        self.plans.append(plan)
        return plan.replace(rows=plan.rows + tuple(self.rows(plan)))


FIRST = (PlanRow(7, 0, 2, payload={"hint": "x"}), PlanRow(8, 1, 2, spare=1))
GROUP, REWARD = torch.tensor([0, 1, 0, 1, 1]), torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5], dtype=torch.float64)


def test_a_later_round_sees_the_first_rows_with_their_payloads_and_all_rewards_so_far():
    m = Asks(lambda plan: [plan.so_far[1].row.replace(n=1, spare=0)] if plan.round < 3 else [])
    rounds = Rounds(MethodStack([m]), FIRST, 2, 8)
    more = rounds.more(GROUP, REWARD)
    assert [(r.prompt_index, r.group, r.n) for r in more] == [(8, 1, 1)]
    rounds.more(torch.cat([GROUP, torch.tensor([1])]), torch.cat([REWARD, torch.tensor([0.6], dtype=torch.float64)]))
    first, second = m.plans
    assert (first.round, second.round, first.budget, second.budget, first.group_size) == (1, 2, 4, 3, 2)
    assert not first.first and not second.first
    assert [g.row for g in second.so_far] == list(FIRST)
    assert second.so_far[0].rewards.tolist() == [0.1, 0.3]
    assert second.so_far[1].rewards.tolist() == [0.2, 0.4, 0.5, 0.6]
    last = rounds.more(torch.cat([GROUP, torch.tensor([1, 1])]), torch.cat([REWARD, torch.zeros(2).double()]))
    assert last == () and [r.n for r in rounds.rows] == [2, 2, 1, 1] and rounds.number == 3


def test_more_than_the_budget_is_refused():
    m = Asks(lambda plan: [plan.so_far[0].row.replace(n=5)])
    with pytest.raises(MethodError, match="The plan trains 5 rows, the batch takes 4"):
        Rounds(MethodStack([m]), FIRST, 2, 8).more(GROUP, REWARD)


def test_a_prompt_beyond_the_dataset_is_refused():
    m = Asks(lambda plan: [PlanRow(9, 2, 1)])
    assert Rounds(MethodStack([m]), FIRST, 2, 8, 10).more(GROUP, REWARD) == (PlanRow(9, 2, 1),)
    with pytest.raises(MethodError, match="prompt 9 of a dataset of 9 rows"):
        Rounds(MethodStack([m]), FIRST, 2, 8, 9).more(GROUP, REWARD)


def test_a_method_that_never_ends_is_stopped_after_the_same_number_of_rounds_everywhere():
    m = Asks(lambda plan: [plan.so_far[0].row.replace(n=0, spare=1)])
    rounds = Rounds(MethodStack([m]), FIRST, 2, 8)
    for _ in range(MAX_ROUNDS - 1):
        assert len(rounds.more(GROUP, REWARD)) == 1
    with pytest.raises(MethodError, match=f"`asks` asked for more rollouts in {MAX_ROUNDS} rounds of one batch"):
        rounds.more(GROUP, REWARD)


def test_methods_without_rounds_are_not_asked():
    class Once(Asks):
        name = "once"
        rounds = False

    m = Once(lambda plan: [FIRST[0]])
    assert not in_rounds(MethodStack([m])) and in_rounds(MethodStack([Asks(lambda plan: [])]))
    assert Rounds(MethodStack([m]), FIRST, 2, 8).more(GROUP, REWARD) == () and not m.plans


def test_a_later_round_is_of_the_batch_the_first_was_of():
    m = Asks(lambda plan: [])
    stack = MethodStack([m])
    stack.batch = 7
    Rounds(stack, (*FIRST, PlanRow(9, 2, 0)), 2, 8).more(GROUP, REWARD)
    assert [plan.batch for plan in m.plans] == [7]
    assert [g.rewards.tolist() for g in m.plans[0].so_far] == [[0.1, 0.3], [0.2, 0.4, 0.5], []]
    Rounds(stack, FIRST, 2, 60).more(
        torch.arange(60) % 2, torch.arange(60).double()
    )  # an unstable sort would mix these
    assert [g.rewards.tolist() for g in m.plans[1].so_far] == [[*range(0, 60, 2)], [*range(1, 60, 2)]]


class Reasons(Watcher):
    """Keeps the groups that methods gave a reason for in `plan`."""

    name = "reasons"

    def __init__(self):
        super().__init__()
        self.groups = set()

    def saw(self, hook, method, args, result, notes):
        self.groups |= {group for note in notes if hook == "plan" for group in note.rows}


def one_fails(group, k):
    return float(group > 0)


def mixed(group, k):
    return float(k % 2)


@pytest.mark.parametrize(
    ("name", "params", "reward"),
    [
        ("dynamic_sampling", {"max_rounds": 3, "refill": 1.3}, lambda group, k: 0.0),
        ("dars", {"n_first": 4, "n_max": 16}, lambda group, k: float(group > 1)),
        ("xrpo_allocate", {"phases": 4}, mixed),
        ("xrpo_seeds", {}, mixed),
        ("best_perm", {"templates": ["{prompt} a", "{prompt} b"], "n_hint": 1, "n_first": 6}, one_fails),
        (
            "v0_5",
            {"prior": "constant", "prior_value": 1.0, "k_init": 1, "k_max": 7, "increment": 2, "cost": 0.0},
            mixed,
        ),
    ],
)
def test_a_method_with_rounds_tells_how_many_at_most_and_why_it_asks(name, params, reward):
    """With these rewards a batch takes as many rounds, or rollouts, as are told."""
    reasons = Reasons()
    stack = MethodStack([*build_stack([name], {name: params}).methods, reasons])
    stack.start(make_run(group_size=8, dataset_size=40, dataset=[{"prompt": "a question"}] * 40))
    plan = first_plan(stack, range(4), 8, 32, 40)
    rounds = Rounds(stack, plan.rows, 8, 32, 40)
    while True:
        group = torch.tensor([row.group for row in rounds.rows for _ in range(row.n + row.spare)])
        number = [group[:i].tolist().count(g) for i, g in enumerate(group.tolist())]
        rewards = [reward(g, k) for g, k in zip(group.tolist(), number, strict=True)]
        reasons.groups.clear()
        more = rounds.more(group, torch.tensor(rewards, dtype=torch.float64))
        if not more:
            break
        assert {row.group for row in more} <= reasons.groups
    most, rollouts = most_in_rounds(stack, plan)
    assert rounds.number <= most and len(group) <= rollouts
    assert rounds.number == most or len(group) == rollouts
