"""XRPO (arXiv 2510.06672): the allocator, the seeds, the sharpening, apart and as a bundle, through the driver."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from golden_cases import Case, Golden, plain
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import t as student

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.method import Method
from rl_plugins.core.params import build_params
from rl_plugins.core.rollouts import Completion, GroupSoFar, Plan, PlanRow, Rollouts, Tokens
from rl_plugins.kit.services import media_of, prompt_text
from rl_plugins.methods.mc_grpo import McGrpo
from rl_plugins.methods.xrpo import XRPO
from rl_plugins.methods.xrpo.similarity import tfidf_cosine, words
from rl_plugins.methods.xrpo_allocate import XrpoAllocate, allocate, half_width
from rl_plugins.methods.xrpo_novelty import XrpoNovelty, relative_likelihood
from rl_plugins.methods.xrpo_seeds import XrpoSeeds
from rl_plugins.runtime.decide import check_full
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.runtime.state import load_state, save_state
from rl_plugins.testing import make_plan, make_rollouts, make_run, make_tokens, one_step, start_stack

GOLDEN = Golden("xrpo")
NAN = math.nan
TEXTS = ("add 3 and 4", "add 5 and 6", "multiply 3 by 4", "name the capital", "add 3 and 9", "multiply 5 by 6")


class Table:
    """A dataset with random access."""

    column_names = ["prompt"]

    def __init__(self, texts: Sequence[Any] = TEXTS) -> None:
        self.texts = texts

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, i: int) -> dict[str, Any]:
        return {"prompt": self.texts[i]}


def stack_of(*methods: Method, group_size: int = 8, dataset: Any = None, **facts: Any) -> MethodStack:
    dataset = dataset or Table()
    facts = {"dataset": dataset, "dataset_size": len(dataset), "columns": ("prompt",), **facts}
    return start_stack(*methods, run=make_run(group_size=group_size, **facts))


def allocating(group_size: int = 8, **params: Any) -> MethodStack:
    return stack_of(XrpoAllocate(build_params(XrpoAllocate.Params, params, "xrpo_allocate")), group_size=group_size)


def seeding(group_size: int = 8, dataset: Any = None, **params: Any) -> MethodStack:
    method = XrpoSeeds(build_params(XrpoSeeds.Params, params, "xrpo_seeds"))
    return stack_of(method, group_size=group_size, dataset=dataset)


def generated(
    stack: MethodStack, rewards: Sequence[Sequence[float]], group_size: int, prompts: Sequence[int] | None = None
) -> tuple[Rollouts, Rounds]:
    """A batch, round by round; `rewards[group]` are those of its rollouts in order, the last of them again and again.
    A rollout's text tells its group and number."""
    n = len(rewards)
    plan = first_plan(stack, prompts or range(n), group_size, n * group_size, len(TEXTS))
    rounds = Rounds(stack, plan.rows, group_size, n * group_size, len(TEXTS))
    while True:
        each = [row for row in rounds.rows for _ in range(row.n + row.spare)]
        group = [row.group for row in each]
        number = [group[:i].count(g) for i, g in enumerate(group)]
        values = [float(rewards[g][min(k, len(rewards[g]) - 1)]) for g, k in zip(group, number, strict=True)]
        rollouts = make_rollouts(
            values,
            group,
            prompt_index=[row.prompt_index for row in each],
            text=[f"answer {g}.{k}" for g, k in zip(group, number, strict=True)],
            meta={"prompt": [(row.edit or {}).get("prompt", TEXTS[row.prompt_index]) for row in each]},
        )
        if not rounds.more(rollouts.group, rollouts.reward):
            return rollouts, rounds


def sizes(rollouts: Rollouts) -> list[int]:
    return torch.bincount(rollouts.group).tolist()


def flat(lists: Any) -> list[Any]:
    return [x for part in lists for x in part]


def logged(stack: MethodStack) -> dict[str, float]:
    return combine([stack.metrics.take()])


# ---- where rollouts go


def test_half_widths() -> None:
    assert half_width(np.array([0.5, 2.0, 0.0]), np.array([8, 2, 1]), 0.05) == pytest.approx(
        [2.364624 * 0.5 / math.sqrt(8), 12.706205 * 2 / math.sqrt(2), 0.0], rel=1e-6
    )
    assert half_width(np.array([1.0]), np.array([11]), 0.1) == pytest.approx([1.812461 / math.sqrt(11)], rel=1e-6)


def loop(n: list[int], std: list[float], drawn: int, total: int, alpha: float, weight: float) -> list[int]:
    """Rollout by rollout, prompt by prompt."""

    def width(n: int, s: float) -> float:
        return 0.0 if s == 0 else float(student.ppf(1 - alpha / 2, n - 1)) * s / math.sqrt(n)

    have = list(n)
    for t in range(total):
        best, most = 0, -math.inf
        for i, s in enumerate(std):
            k = have[i]
            priority = width(k, s) - width(k + 1, s) + weight * math.sqrt(math.log(1 + drawn + t) / max(k, 1))
            if priority > most + 1e-12 or (priority > most - 1e-12 and k < have[best]):
                best, most = i, priority
        have[best] += 1
    return [h - k for h, k in zip(have, n, strict=True)]


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(st.integers(2, 12), st.sampled_from([0.0, 0.1, 0.35, 0.5, 1.7])), min_size=1, max_size=6
    ),
    total=st.integers(0, 25),
    alpha=st.sampled_from([0.01, 0.05, 0.3]),
    weight=st.sampled_from([0.0, 0.1, 0.5]),
)
def test_allocation_equals_the_loop(prompts: list[tuple[int, float]], total: int, alpha: float, weight: float) -> None:
    n, std = [p[0] for p in prompts], [p[1] for p in prompts]
    found = allocate(n, std, sum(n) + 1, total, alpha, weight)
    assert found == loop(n, std, sum(n) + 1, total, alpha, weight)
    assert sum(found) == total and min(found) >= 0


def test_allocation_by_hand() -> None:
    """The fall of the half width from 4 to 5 rollouts is (3.182/2 - 2.776/sqrt 5) s = 0.3496 s."""
    assert allocate([4, 4], [0.5, 0.57], 8, 1, exploration=0.0) == [0, 1]
    width = half_width(np.ones(2), np.array([4, 5]), 0.05)
    assert width[0] - width[1] == pytest.approx(0.34955, abs=1e-4)
    # prompts that are certain are ordered by the bonus: fewest rollouts first, then the first
    assert allocate([5, 3, 3], [0.0] * 3, 11, 4) == [0, 2, 2]
    assert allocate([5, 3, 3], [0.0] * 3, 11, 1, exploration=0.0) == [0, 1, 0]
    # 0.25 against 0.14 with a bonus of log(1 + 24) / n
    bonus = [0.5 * math.sqrt(math.log(25) / n) for n in (4, 20)]
    assert bonus == pytest.approx([0.4485, 0.2006], abs=1e-4)
    assert allocate([4, 20], [0.0, 5.0], 24, 1, exploration=0.0) == [0, 1]
    assert allocate([4, 20], [0.0, 1.0], 24, 1, exploration=0.5) == [1, 0]


def test_the_bonus_grows_with_all_rollouts_made_and_handed_out() -> None:
    assert (
        allocate([2, 4], [0.0, 0.3], 6, 24, exploration=0.05) == loop([2, 4], [0, 0.3], 6, 24, 0.05, 0.05) == [10, 14]
    )
    of_drawn = [allocate([1, 4], [0.0, 0.5], drawn, 8, exploration=0.4) for drawn in (5, 8)]
    assert of_drawn == [[4, 4], [5, 3]]
    stack = allocating(8, phases=2, exploration=0.4)  # three of eight have no reward, and count as made
    rollouts, _ = generated(stack, [[0.0, NAN, NAN, NAN], [1.0, 0.0, 0.0, 0.0]], 8)
    assert sizes(rollouts) == [4 + 5, 4 + 3]


def test_the_confidence_counts() -> None:
    for alpha, extra in ((0.05, [5, 3]), (0.5, [4, 4])):
        stack = allocating(8, phases=2, alpha=alpha, exploration=0.1)
        rewards = [[1.0, 0.0, 1.0, 0.0], [0.7, 0.0, 0.0, 0.0]]
        std = [float(np.std(r, ddof=1)) for r in rewards]
        assert allocate([4, 4], std, 8, 8, alpha, 0.1) == loop([4, 4], std, 8, 8, alpha, 0.1) == extra
        assert sizes(generated(stack, rewards, 8)[0]) == [4 + e for e in extra]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 9), prompts=st.integers(1, 6), total=st.integers(0, 30), std=st.sampled_from([0.0, 0.4]))
def test_equal_deviations_without_a_bonus_are_as_equal_as_possible(
    n: int, prompts: int, total: int, std: float
) -> None:
    found = allocate([n] * prompts, [std] * prompts, n * prompts, total, exploration=0.0)
    assert found == [total // prompts + (i < total % prompts) for i in range(prompts)]


@settings(max_examples=40, deadline=None)
@given(n=st.integers(2, 500), std=st.floats(1e-3, 10), alpha=st.floats(0.01, 0.5))
def test_one_more_rollout_always_helps_where_there_is_a_deviation(n: int, std: float, alpha: float) -> None:
    now, then = half_width(np.full(2, std), np.array([n, n + 1]), alpha)
    assert now > then


def test_phases() -> None:
    """32 rollouts of 4 prompts: 16 first, then 8 and 8; of 35 in 4 phases 19 are left after 4 x 4: 7, 6, 6."""
    stack = allocating(8)
    rewards = [[1.0, 0.0] * 2 + [0.0], [0.0], [1.0], [1.0, 1.0, 1.0, 0.0]]
    rollouts, rounds = generated(stack, rewards, 8)
    assert len(rollouts) == 32 and rounds.number == 3
    rows = rounds.rows
    assert [r.n for r in rows[:4]] == [4] * 4 and sum(r.n for r in rows[4:]) == 16
    second = allocate([4] * 4, [np.std([1, 0, 1, 0], ddof=1), 0, 0, np.std([1, 1, 1, 0], ddof=1)], 16, 8)
    assert second == [4, 0, 0, 4] and [(r.group, r.n) for r in rows[4:6]] == [(0, 4), (3, 4)]
    n = [8, 4, 4, 8]
    std = [np.std([1, 0, 1, 0] + [0] * 4, ddof=1), 0, 0, np.std([1, 1, 1, 0] + [0] * 4, ddof=1)]
    assert [(r.group, r.n) for r in rows[6:]] == [(i, e) for i, e in enumerate(allocate(n, std, 24, 8)) if e]
    assert not any(r.spare for r in rows)

    stack = allocating(9, n_first=4, phases=4)
    books = Rounds(stack, [PlanRow(i, i, 9) for i in range(4)], 9, 35, 16)
    (method,) = stack.methods
    first = method.plan(make_plan(4, 9).replace(rows=(*(PlanRow(i, i, 9) for i in range(3)), PlanRow(3, 3, 8))))
    books.rows, planned = list(first.rows), []
    while more := books.more(*_zeros(books.rows)):
        planned.append(sum(r.n for r in more))
    assert planned == [7, 6, 6]


def _zeros(rows: Sequence[PlanRow]) -> tuple[torch.Tensor, torch.Tensor]:
    group = torch.tensor([r.group for r in rows for _ in range(r.n + r.spare)])
    return group, torch.zeros(len(group), dtype=torch.float64)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_total_is_the_hosts(data: st.DataObject) -> None:
    size = data.draw(st.integers(3, 9))
    params = {
        "n_first": data.draw(st.one_of(st.none(), st.integers(2, size - 1))),
        "phases": data.draw(st.integers(2, 5)),
        "exploration": data.draw(st.sampled_from([0.0, 0.2])),
    }
    outcome = st.lists(st.sampled_from([0.0, 1.0, NAN]), min_size=1, max_size=12)
    rewards = data.draw(st.lists(outcome, min_size=1, max_size=5))
    stack = allocating(size, **params)
    rollouts, _ = generated(stack, rewards, size)
    assert len(rollouts) == size * len(rewards)
    assert min(sizes(rollouts)) >= (params["n_first"] or max(2, size // 2))
    again, _ = generated(allocating(size, **params), rewards, size)
    assert torch.equal(again.group, rollouts.group)
    check_full(stack, one_step(stack, rollouts), len(rollouts))


def test_nan_rewards_are_not_counted() -> None:
    """Of the first prompt 2 of 4 are known, of the second 1, of the third none: s of one is 0."""
    stack = allocating(8, phases=2)
    rewards = [[1.0, NAN, NAN, 0.0, 0.0], [NAN, 1.0, NAN, NAN, 1.0], [NAN], [1.0, 0.0]]
    rollouts, _ = generated(stack, rewards, 8)
    wanted = allocate([2, 1, 0, 4], [math.sqrt(0.5), 0.0, 0.0, 0.5], 16, 16)
    assert [n - 4 for n in sizes(rollouts)] == wanted and sum(wanted) == 16


def test_rows_are_kept_and_given_completions_are_left() -> None:
    stack = allocating(8, phases=2)
    (method,) = stack.methods
    given = PlanRow(5, 9, 8, given=(Completion((1,)),) * 8)
    row = PlanRow(3, 7, 8, spare=1, edit={"prompt": "x"}, payload="mine")
    first = method.plan(make_plan(1, 8).replace(rows=(row, given)))
    assert first.rows == (row.replace(n=4), given)
    rounds = Rounds(stack, first.rows, 8, 16, 16)
    assert rounds.more(*_zeros(first.rows)) == (row.replace(n=4, spare=0),)
    few = method.plan(make_plan(1, 8).replace(rows=(PlanRow(0, 0, 3), PlanRow(1, 1, 8))))
    assert [r.n for r in few.rows] == [3, 4]


def test_rows_that_another_method_added_in_the_round_take_room() -> None:
    (method,) = allocating(8, phases=2).methods
    assert method.plan(make_plan(2, 8)).trained == 8 and method.state["left"] == 8
    so_far = tuple(GroupSoFar(PlanRow(i, i, 4), torch.zeros(4).double()) for i in range(2))
    added = PlanRow(4, 9, 3)
    found = method.plan(Plan((added,), 8, 8, 1, so_far))
    assert found.rows == (added, PlanRow(0, 0, 3), PlanRow(1, 1, 2))


def test_what_the_allocator_logs() -> None:
    stack = allocating(8, n_first=4, phases=2)
    rollouts, _ = generated(stack, [[1.0, 0.0, 1.0, 0.0], [0.0]], 8)
    told, (a, b) = logged(stack), sizes(rollouts)
    assert (a, b) == (12, 4) and told["xrpo_allocate/most"] == 12 and told["xrpo_allocate/moved"] == 4 / 16
    width = half_width(np.array([np.std([1, 0, 1, 0], ddof=1)]), np.array([4]), 0.05)
    assert told["xrpo_allocate/half_width"] == pytest.approx(width[0])
    both = stack_of(McGrpo(), XrpoAllocate(XrpoAllocate.Params(n_first=4, phases=2)))
    rollouts, _ = generated(both, [[1.0, 0.0, 1.0, 0.0], [0.0]], 8)
    assert logged(both)["xrpo_allocate/most"] == max(sizes(rollouts)) - 1, "its pivot is not trained"
    stack = allocating(8)  # of two phases the last one tells
    generated(stack, [[1.0, 0.0, 1.0, 0.0], [0.0]], 8)
    assert set(logged(stack)) == {f"xrpo_allocate/{n}" for n in ("most", "moved", "half_width")}
    stack = allocating(8, phases=2)
    generated(stack, [[0.0], [0.0]], 8)
    assert logged(stack) == {"xrpo_allocate/most": 8, "xrpo_allocate/moved": 0}


def test_allocator_refusals() -> None:
    for size, params in ((8, {"n_first": 9}), (8, {"n_first": 8}), (2, {})):
        with pytest.raises(ConfigError, match=f"the run has {size} rollouts per prompt"):
            allocating(size, **params)
    for params, text in (
        ({"phases": 1}, "`phases` is 1"),
        ({"n_first": 1}, "`n_first` is 1"),
        ({"alpha": 1}, "`alpha`"),
    ):
        with pytest.raises(ConfigError, match=text):
            build_params(XrpoAllocate.Params, params, "xrpo_allocate")
    assert "several_rollouts" in XrpoAllocate.needs
    with pytest.raises(ConfigError, match="`xrpo_allocate` and `v0_5` both decide how many rollouts"):
        build_stack(["xrpo_allocate", "v0_5"])


# ---- likeness


def test_tfidf_by_hand() -> None:
    """3 documents: "a" is in two of them, "b" and "c" in one each."""
    a, b, unseen = 1 + math.log(4 / 3), 1 + math.log(4 / 2), 1 + math.log(4)
    documents = [words(t) for t in ("A b", "a a", "c")]
    query = words("a B b z")
    norm = math.sqrt(a**2 + 4 * b**2 + unseen**2)
    wanted = [(a * a + 2 * b * b) / math.sqrt(a**2 + b**2) / norm, a / norm, 0.0]
    none = words("?!")
    found = tfidf_cosine([query, none, words("A  b")], documents, [None] * 3)
    assert found[0].tolist() == pytest.approx(wanted) and found[1].tolist() == [0.0] * 3
    assert found[2, 0] == pytest.approx(1)
    assert tfidf_cosine([query], [none], [None]).tolist() == [[0.0]] == tfidf_cosine([none], [none], [None]).tolist()
    # a query that is one of the documents is as if it were none of them
    own = tfidf_cosine([documents[1]], documents, [1])[0]
    assert own[[0, 2]].tolist() == pytest.approx(tfidf_cosine([documents[1]], documents[::2], [None])[0].tolist())
    assert own[1] == 0
    assert words("3x x, X_1 é") == Counter({"3x": 1, "x": 1, "x_1": 1, "é": 1})


# ---- seeds


def solved(stack: MethodStack, *prompts: int) -> None:
    """Puts an answer of each into the corpus."""
    for method in stack.methods:
        if isinstance(method, XrpoSeeds):
            method.state["answers"] |= {str(i): f"solution of {i}" for i in prompts}


def shown(rollouts: Rollouts, group: int) -> list[Any]:
    prompts = rollouts.meta["prompt"]
    return [prompts[i] for i in range(len(rollouts)) if int(rollouts.group[i]) == group]


def test_half_of_the_rollouts_move_to_a_second_round_with_examples() -> None:
    stack = seeding(7)
    solved(stack, 1, 2, 3, 5)
    rollouts, rounds = generated(stack, [[0.0], [0.0, 1.0], [NAN], [1.0]], 7, prompts=[0, 4, 5, 2])
    assert [(r.group, r.n) for r in rounds.rows] == [(g, 4) for g in range(4)] + [(g, 3) for g in range(4)]
    assert sizes(rollouts) == [7] * 4 and rounds.number == 2
    for g, prompt in ((1, 4), (2, 5), (3, 2)):  # one success, no reward at all, all right
        assert stack.methods[0]._examples({prompt})[prompt] and shown(rollouts, g) == [TEXTS[prompt]] * 7
    assert shown(rollouts, 0)[:4] == [TEXTS[0]] * 4
    (prompt,) = set(shown(rollouts, 0)[4:])
    assert prompt == (
        "Here are similar problems with their solutions.\n\n"
        "Problem:\nmultiply 3 by 4\n\nSolution:\nsolution of 2\n\n"
        "Problem:\nadd 5 and 6\n\nSolution:\nsolution of 1\n\n"
        "Solve this problem in the same way.\n\nadd 3 and 4"
    )
    told = logged(stack)
    assert told["xrpo_seeds/later"] == 12
    one_step(stack, rollouts)
    told = logged(stack)
    assert told["xrpo_seeds/seeded"] == 3 and told["xrpo_seeds/right"] == 0 and told["xrpo_seeds/rescued"] == 0
    check_full(stack, one_step(seeding(7), rollouts), 28)


def test_examples_are_the_most_similar_and_never_the_prompt_itself() -> None:
    stack = seeding()
    (method,) = stack.methods
    examples = lambda prompt: method._examples({prompt})[prompt]
    assert examples(0) == []
    solved(stack, 0)
    assert examples(0) == []  # itself alone
    solved(stack, 3)
    assert examples(0) == []  # nothing in common
    solved(stack, 1, 2, 4, 5)
    assert examples(0) == [4, 2] and examples(5) == [1, 2]
    assert method._examples({0, 5}) == {0: [4, 2], 5: [1, 2]}
    assert XrpoSeeds(XrpoSeeds.Params(examples=3)).params.examples == 3
    stack = seeding(examples=1)
    solved(stack, 4, 1, 2)
    assert stack.methods[0]._examples({0}) == {0: [4]}
    twins = seeding(dataset=Table(["x y", "x z", "x w", "q"]))
    solved(twins, 1, 2)
    assert twins.methods[0]._examples({0, 3}) == {0: [2, 1], 3: []}  # of equal ones the newest


@pytest.mark.parametrize("embed", [None, lambda texts: [[1.0, float(len(t))] for t in texts]])
def test_more_texts_than_are_kept(embed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Words and embeddings that are thrown away are made again."""
    wanted = []
    for most in (65536, 2):
        monkeypatch.setattr("rl_plugins.methods.xrpo_seeds.MOST_TEXTS", most)
        stack = seeding(embed=embed)
        solved(stack, 4, 1, 2)
        wanted.append([stack.methods[0]._examples({i})[i] for i in (0, 5, 3, 5, 0, 1)])
    assert wanted[0] == wanted[1]


def test_prompts_without_an_example_stay_plain() -> None:
    for prompts in ((), (0,), (3,)):
        stack = seeding()
        solved(stack, *prompts)
        rollouts, _ = generated(stack, [[0.0]], 8)
        assert shown(rollouts, 0) == [TEXTS[0]] * 8
        one_step(stack, rollouts)
        assert logged(stack)["xrpo_seeds/seeded"] == 0


def test_a_prompt_that_has_a_success_stays_plain_from_then_on() -> None:
    """Three phases of the allocator: the seeded second one succeeds."""
    stack = stack_of(XrpoAllocate(), XrpoSeeds(XrpoSeeds.Params(second_round=False)))
    solved(stack, 1)
    rollouts, rounds = generated(stack, [[0.0] * 4 + [1.0] + [0.0], [0.0]], 8, prompts=[0, 3])
    rows = [(r.n, r.edit is not None) for r in rounds.rows if r.group == 0]
    assert [edited for _, edited in rows] == [False, True, False] and sum(n for n, _ in rows) == sizes(rollouts)[0]
    plain_stack = allocating(8)
    same, _ = generated(plain_stack, [[0.0] * 4 + [1.0] + [0.0], [0.0]], 8, prompts=[0, 3])
    assert torch.equal(same.group, rollouts.group), "seeds decide no number"
    one_step(stack, rollouts)
    told = logged(stack)
    assert told["xrpo_seeds/rescued"] == 1 and told["xrpo_seeds/seeded"] == rows[1][0]
    assert told["xrpo_seeds/right"] == 1 / rows[1][0]


def test_messages_edits_and_rows_that_cannot_be_seeded() -> None:
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "add 3 and 4"}]
    stack = seeding(dataset=Table([messages, "add 5 and 6"]), second_round=False)
    solved(stack, 1)
    (method,) = stack.methods
    row = PlanRow(0, 0, 4, payload="mine")

    def later(row: PlanRow, new: PlanRow | None = None) -> PlanRow:
        so_far = (GroupSoFar(row, torch.zeros(4).double()),)
        (found,) = method.plan(Plan((new or row,), 8, 64, 1, so_far)).rows
        return found

    seeded = later(row)
    assert seeded.payload == "mine" and seeded.n == 4
    system, user = seeded.edit["prompt"]
    assert system == messages[0] and user["role"] == "user"
    assert user["content"].startswith("Here are similar") and user["content"].endswith("add 3 and 4")
    assert messages[1]["content"] == "add 3 and 4"
    edited = later(row.replace(edit={"prompt": "a hint. add 3 and 4", "answer": 7}))
    assert edited.edit["answer"] == 7 and edited.edit["prompt"].endswith("same way.\n\na hint. add 3 and 4")
    assert later(row.replace(prompt_index=-1, edit={"prompt": "x"})).edit == {"prompt": "x"}
    given = row.replace(given=(Completion((1,)),))
    assert later(row, given) == given
    other = PlanRow(1, 5, 2)
    assert later(row, other) == other  # a new group, of which nothing is known


def test_a_batch_that_is_skipped_leaves_nothing_behind() -> None:
    """Without any reward no hook sees the batch after its plan."""
    stack = seeding(7)
    solved(stack, 1, 2)
    rollouts, _ = generated(stack, [[0.0], [NAN]], 7)
    one_step(stack, rollouts.replace(reward=rollouts.reward * NAN, rewards=rollouts.rewards * NAN))
    assert stack.methods[0].state["seeded"]
    rollouts, _ = generated(stack, [[1.0], [NAN]], 7)
    assert sizes(rollouts) == [7, 7]
    one_step(stack, rollouts)
    assert logged(stack)["xrpo_seeds/seeded"] == 0


def test_only_rows_without_given_completions_are_split() -> None:
    stack = seeding(8)
    (method,) = stack.methods
    given = PlanRow(5, 9, 8, given=(Completion((1,)),) * 8)
    rows = (PlanRow(0, 0, 5, spare=2), given, PlanRow(1, 1, 1))
    first = method.plan(make_plan(1, 8).replace(rows=rows))
    assert first.rows == (PlanRow(0, 0, 3, spare=2), given, PlanRow(1, 1, 1))
    rounds = Rounds(stack, first.rows, 8, 64, 16)
    assert rounds.more(*_zeros(first.rows)) == (PlanRow(0, 0, 2),)
    assert rounds.more(*_zeros(rounds.rows)) == ()


def observed(stack: MethodStack, rewards: Sequence[float], prompts: Sequence[int], **changes: Any) -> dict[str, str]:
    text = [f"t{i}" for i in range(len(rewards))]
    values = {"text": text, "prompt_index": prompts, **changes}
    one_step(stack, make_rollouts(rewards, prompts, **values))
    return stack.methods[0].state["answers"]


def test_the_corpus_holds_right_answers_the_newest_of_each_prompt() -> None:
    stack = seeding(corpus_size=3, max_characters=6)
    assert observed(stack, [0.0, 1.0, 1.0, NAN, 0.5, 0.49], [2, 2, 2, 3, 4, 5]) == {"2": "t1", "4": "t4"}
    assert logged(stack)["xrpo_seeds/corpus"] == 2
    assert observed(stack, [1.0, 1.0], [5, -1]) == {"2": "t1", "4": "t4", "5": "t0"}
    found = observed(stack, [1.0, 0.0], [2, 4], text=["123456789", "x"])
    assert list(found.items()) == [("4", "t4"), ("5", "t0"), ("2", "123456")]  # the newest is the last
    assert list(observed(stack, [1.0, 1.0], [0, 1])) == ["2", "0", "1"]  # the oldest are gone
    assert observed(stack, [1.0, 1.0], [3, 3], text=["  ", "good"])["3"] == "good"
    stack = seeding(success_threshold=2.0)
    assert observed(stack, [1.0, 2.0], [0, 1]) == {"1": "t1"}


def test_answers_of_rows_that_left_and_of_several_rows() -> None:
    stack = seeding()
    rollout, index = torch.tensor([0, 0, 1]), torch.tensor([1, 0, 0])
    found = observed(stack, [1.0, 1.0, 0.0], [2, 2, 2], rollout=rollout, index=index)
    assert found == {"2": "t1\nt0"}  # in the order of its rows
    found = observed(stack, [1.0, 0.0], [1, 4], kept=torch.tensor([False, True]))
    assert found["1"] == "t0"


def test_a_corpus_survives(tmp_path: Any) -> None:
    stack = seeding()
    rollouts, _ = generated(stack, [[0.0], [1.0], [1.0, 0.0]], 8)
    one_step(stack, rollouts)
    save_state(tmp_path, stack.state_dict("d"))
    other = seeding()
    other.load_state_dict(load_state(tmp_path), "d")
    assert (
        other.methods[0].state
        == stack.methods[0].state
        == {
            "answers": {"1": "answer 1.0", "2": "answer 2.0"},
            "left": {},
            "seeded": [],
        }
    )
    one, _ = generated(stack, [[0.0]], 8)
    two, _ = generated(other, [[0.0]], 8)
    assert shown(one, 0) == shown(two, 0) and shown(one, 0)[-1] != TEXTS[0]


def test_embeddings_of_a_function() -> None:
    calls: list[list[str]] = []

    def embed(texts: list[str]) -> list[list[float]]:
        calls.append(texts)
        return [[float(len(t)), 0.0] if "3" in t else [0.0, 2.0] if "5" in t else [-1.0, 0.0] for t in texts]

    stack = seeding(embed=embed)
    solved(stack, 1, 3, 4, 5, 2)
    (method,) = stack.methods
    assert method._examples({0})[0] == [2, 4]
    assert method._examples({5})[5] == [1]  # a cosine of 0 is none
    assert calls == [[TEXTS[i] for i in (0, 2, 5, 4, 3, 1)]]  # each text once
    messages = Table([[{"role": "user", "content": "add 3"}], "add 4 and 3", "5"])
    stack = seeding(dataset=messages, embed=embed)
    solved(stack, 1, 2)
    assert stack.methods[0]._examples({0})[0] == [1] and calls[-1] == ["add 3", "5", "add 4 and 3"]


def test_embeddings_may_be_tensors_with_a_gradient_in_bfloat16() -> None:
    table = lambda texts: torch.tensor([[float(len(t)), 1.0] for t in texts], dtype=torch.bfloat16, requires_grad=True)
    stack = seeding(embed=table)
    solved(stack, 1)
    assert stack.methods[0]._examples({0})[0] == [1]


def test_the_length_of_an_embedding_is_of_no_matter() -> None:
    vectors = {"q": [0.1, 0.0], "long": [10.0, 10.0], "near": [1.0, 0.1], "none": [0.0, 0.0]}
    stack = seeding(dataset=Table(list(vectors)), embed=lambda texts: [vectors[t] for t in texts])
    solved(stack, 1, 2, 3)
    assert stack.methods[0]._examples({0})[0] == [2, 1] and stack.methods[0]._examples({3})[3] == []


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda texts: [[1.0]], r"shape \(1, 1\) for 2 texts"),
        (lambda texts: [1.0, 2.0], r"shape \(2,\) for 2 texts"),
        (lambda texts: [[1.0], [1.0, 2.0]], "no table of numbers for 2 texts"),
        (lambda texts: "ab", "no table of numbers for 2 texts"),
        (lambda texts: [[NAN], [1.0]], r"a row of finite numbers for each"),
        (lambda texts: 1 / 0, "ZeroDivisionError"),
    ],
)
def test_embeddings_that_cannot_be(answer: Any, text: str) -> None:
    stack = seeding(embed=answer)
    solved(stack, 1)
    with pytest.raises(MethodError, match=f"`xrpo_seeds`.*{text}"):
        generated(stack, [[0.0]], 8)


def test_prompts_with_images_are_refused() -> None:
    part = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "what?"}]}]
    assert media_of(make_run(columns=("prompt", "images"))) == "images"
    assert media_of(make_run(columns=("prompt", "video", "audios"))) == "video, audios"
    assert media_of(make_run(dataset=Table([part]), dataset_size=1)) == "prompt (image)"
    assert media_of(make_run(dataset=Table([[{"role": "user", "content": "x"}]]), dataset_size=1)) == ""
    with pytest.raises(ConfigError, match=r"the prompts have images, and examples .* remove `xrpo_seeds`"):
        stack_of(XrpoSeeds(), columns=("prompt", "images"))
    with pytest.raises(ConfigError, match=r"the prompts have prompt \(image\)"):
        seeding(dataset=Table([part]))


def test_columns_and_templates() -> None:
    assert XrpoSeeds().needs == {"prompt_index", "text", "column:prompt"}
    stack = seeding(prompt_column="question")
    assert stack.methods[0].needs == {"prompt_index", "text", "column:question"}
    solved(stack, 1)
    with pytest.raises(MethodError, match=r"no column `question` \(it has: prompt\)\. Add it"):
        generated(stack, [[0.0]], 8)
    for template, missing in (("{examples}", "{problem}"), ("x", "{examples} and {problem}")):
        with pytest.raises(ConfigError, match=f"`template` lacks {missing}"):
            build_params(XrpoSeeds.Params, {"template": template}, "xrpo_seeds")
    stack = seeding(template="{problem} like {examples}")
    solved(stack, 1)
    assert shown(generated(stack, [[0.0]], 8)[0], 0)[-1].startswith("add 3 and 4 like Problem:")


def test_who_decides_the_number() -> None:
    assert XrpoSeeds().decides_rollouts and not XrpoSeeds(XrpoSeeds.Params(second_round=False)).decides_rollouts
    with pytest.raises(ConfigError, match="`v0_5` and `xrpo_seeds` both decide how many rollouts"):
        build_stack(["v0_5", "xrpo_seeds"])
    off = {"xrpo_seeds": {"second_round": False}}
    assert build_stack(["v0_5", "xrpo_seeds"], off).names == ["v0_5", "xrpo_seeds"]
    assert build_stack(["dars", "xrpo_seeds"], off).names == ["dars", "xrpo_seeds"]
    assert build_stack(["xrpo"]).names == ["xrpo_allocate", "xrpo_seeds", "xrpo_novelty"]
    assert build_stack(["xrpo", "-xrpo_seeds"]).names == ["xrpo_allocate", "xrpo_novelty"]
    assert XRPO.parts["xrpo_seeds"] == {"second_round": False}


def test_without_later_rounds_it_says_that_it_is_idle() -> None:
    stack = seeding(second_round=False)
    rollouts, rounds = generated(stack, [[0.0]], 8)
    assert rounds.number == 1 and sizes(rollouts) == [8]
    assert logged(stack)["xrpo_seeds/later"] == 0
    (idle,) = XrpoSeeds.idle
    assert dict(idle.signs) == {"later": 0} and "second_round" in idle.advice


# ---- rare right answers


def sharpened(rollouts: Rollouts, tokens: Tokens, **params: Any) -> torch.Tensor:
    method = XrpoNovelty(build_params(XrpoNovelty.Params, params, "xrpo_novelty"))
    return method.shape(rollouts, tokens).advantages


def with_logprobs(rollouts: Rollouts, logprobs: Any, advantages: torch.Tensor) -> Tokens:
    return make_tokens(rollouts, advantages=advantages, old_logprobs=torch.as_tensor(logprobs))


@GOLDEN.kind("token_log_probs")
def check_novelty(case: Case) -> None:
    p, wanted = case.params, case.expected
    p.must_be("std", "unbiased")
    rewards, logprobs = plain(case.inputs["rewards"]), plain(case.inputs["token_log_probs"])
    group = [g for g, own in enumerate(rewards) for _ in own]
    each = [tokens for own in logprobs for tokens in own]
    rollouts = make_rollouts(flat(rewards), group, lengths=[len(t) for t in each])
    base = grpo_advantages(rollouts, "group", p["eps"])
    assert base.tolist() == pytest.approx(flat(wanted["base_advantage"]), abs=1e-6)
    tokens = with_logprobs(rollouts, flat(each), base)
    assert [float(np.mean(t)) for t in each] == pytest.approx(flat(wanted["mean_logprob"]), abs=1e-6)
    eta = relative_likelihood(rollouts, tokens)
    assert eta.tolist() == pytest.approx(flat(wanted["eta"]), abs=1e-6)
    weight, cap = p["lambda_novelty"], p["kappa_clip"]
    found = sharpened(rollouts, tokens, weight=weight, cap=cap)
    starts = torch.cumsum(rollouts.length, 0) - rollouts.length
    assert found[starts].tolist() == pytest.approx(flat(wanted["sharpened_positive_only"]), abs=1e-6)
    assert torch.equal(found, found[starts][tokens.row])
    # what others do with wrong answers, for comparison
    theirs = base + torch.minimum((weight * (1 - eta)).clamp(min=0), cap * base.abs())
    assert theirs.tolist() == pytest.approx(flat(wanted["third_party_abs_variant"]), abs=1e-6)


@pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
def test_golden(case: Case) -> None:
    GOLDEN.check(case)


def test_further_golden_cases() -> None:
    GOLDEN.check_further_cases()


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_novelty_equals_the_loop_and_keeps_its_bounds(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 10))
    draw = lambda values: data.draw(st.lists(values, min_size=rows, max_size=rows))
    group, lengths = draw(st.integers(0, 2)), draw(st.integers(0, 4))
    rewards = draw(st.sampled_from([0.0, 1.0, 0.3, NAN]))
    weight, cap = data.draw(st.sampled_from([0.0, 0.5, 2.5])), data.draw(st.sampled_from([0.0, 0.5, 2.0]))
    rollouts = make_rollouts(rewards, group, lengths=lengths)
    advantage = grpo_advantages(rollouts)
    seed = data.draw(st.integers(0, 99))
    tokens = make_tokens(rollouts, seed, advantages=advantage)
    params = {"weight": weight} | ({"cap": cap} if weight else {})
    found = sharpened(rollouts, tokens, **params)
    logprobs = [tokens.old_logprobs[tokens.row == i].double().tolist() for i in range(rows)]
    mean = [sum(x) / len(x) if x and r == r else None for x, r in zip(logprobs, rewards, strict=True)]
    for k, i in enumerate(tokens.row.tolist()):
        a = float(advantage[i])
        own = [m for m, g in zip(mean, group, strict=True) if g == group[i] and m is not None]
        eta = math.exp(mean[i] - sum(own) / len(own)) if mean[i] is not None else 1.0
        bonus = min(max(weight * (1 - eta), 0), cap * a) if a > 0 else 0.0
        assert float(found[k]) == pytest.approx(a + bonus, abs=1e-9)
        assert a - 1e-12 <= float(found[k]) <= a + cap * max(a, 0) + 1e-12
    if weight == 0 or cap == 0:
        assert torch.equal(found, tokens.advantages)
    shifted = replace(tokens, old_logprobs=tokens.old_logprobs.double() + 1.5)
    assert torch.allclose(sharpened(rollouts, shifted, **params), found, atol=1e-9)


def test_equal_likelihoods_and_equal_rewards_change_nothing() -> None:
    rollouts = make_rollouts([1.0, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 1.0], lengths=[3, 2, 1, 4, 1, 2, 3, 4])
    advantage = grpo_advantages(rollouts)
    length = int(rollouts.length.sum())
    equal = with_logprobs(rollouts, torch.full((length,), -0.7), advantage)
    assert torch.equal(sharpened(rollouts, equal), equal.advantages)
    tokens = with_logprobs(rollouts, -5.0 + torch.arange(length) % 5, advantage)
    found = sharpened(rollouts, tokens)
    same_rewards = tokens.row >= 4
    assert float(found[same_rewards].abs().max()) == 0 and not torch.equal(found, tokens.advantages)


def test_a_rollout_of_several_rows_is_one_answer() -> None:
    """The right answer has two rows, of log-probs -1 and -4, -4: -3 a token; the wrong one -2."""
    rollouts = make_rollouts(
        [1.0, 1.0, 0.0], [0] * 3, lengths=[1, 2, 1], rollout=torch.tensor([0, 0, 1]), index=torch.tensor([0, 1, 0])
    )
    tokens = with_logprobs(rollouts, [-1.0, -4.0, -4.0, -2.0], torch.tensor([1.0, 1.0, -1.0]).double())
    eta = math.exp(-3 - (-2.5))
    assert relative_likelihood(rollouts, tokens).tolist() == pytest.approx([eta, math.exp(0.5)])
    found = sharpened(rollouts, tokens, weight=1.0)
    assert found.tolist() == pytest.approx([2 - eta, 2 - eta, 2 - eta, -1.0])


def test_what_is_in_no_mean_has_no_likelihood_of_its_own() -> None:
    rollouts = make_rollouts([1.0, 0.0, NAN, 1.0], [0] * 4, lengths=[1, 1, 1, 0])
    tokens = with_logprobs(rollouts, [-1.0, -3.0, -50.0], torch.zeros(4).double())
    assert relative_likelihood(rollouts, tokens).tolist() == pytest.approx([math.e, 1 / math.e, 1, 1])


def test_tokens_of_different_advantages_have_a_bonus_of_their_own() -> None:
    rollouts = make_rollouts([1.0, 0.0], [0, 0], lengths=[3, 1])
    tokens = with_logprobs(rollouts, [-3.0, -3.0, -3.0, -1.0], torch.zeros(2).double())
    tokens = replace(tokens, advantages=torch.tensor([2.0, 0.1, -1.0, -1.0]).double())
    bonus = 0.5 * (1 - math.exp(-1))
    assert sharpened(rollouts, tokens, weight=0.5).tolist() == pytest.approx([2 + bonus, 0.1 + 0.05, -1.0, -1.0])


def test_what_novelty_logs_and_through_the_driver() -> None:
    stack = stack_of(XrpoNovelty())
    rollouts = make_rollouts([1.0, 1.0, 1.0, 0.0], lengths=[1, 2, 1, 1])
    base = grpo_advantages(rollouts)
    a = float(base[0])
    tokens = make_tokens(rollouts, old_logprobs=torch.tensor([-1.0, -2.0, -2.0, -2.1, -2.9]))
    mean = (-1 - 2 - 2.1 - 2.9) / 4
    bonus = min(2.5 * (1 - math.exp(-2.1 - mean)), a / 2)
    assert 0 < bonus < a / 2
    decision = one_step(stack, rollouts, tokens)
    assert decision.row_advantages.tolist() == pytest.approx([a, a, a + bonus, float(base[3])])
    told = logged(stack)
    assert told["xrpo_novelty/bonus"] == pytest.approx(bonus / 4) and told["xrpo_novelty/capped"] == 0
    assert told["xrpo_novelty/novel"] == pytest.approx(1 / 3)
    stack = stack_of(XrpoNovelty(XrpoNovelty.Params(cap=0.01)))
    one_step(stack, rollouts, tokens)
    assert logged(stack)["xrpo_novelty/capped"] == 1 / 4


def test_without_log_probs_it_is_refused() -> None:
    assert XrpoNovelty.needs == {"tokens", "old_logprobs"}
    rollouts = make_rollouts([1.0, 0.0], [0, 0])
    with pytest.raises(MethodError, match=r"`xrpo_novelty`.*the tokens have no `old_logprobs`"):
        one_step(stack_of(XrpoNovelty()), rollouts, make_tokens(rollouts, old_logprobs=None))


# ---- all three


def test_the_bundle() -> None:
    """Budgets by the allocator, examples for those that failed, a bonus for what was unlikely."""
    parts = [XrpoAllocate(), XrpoSeeds(XrpoSeeds.Params(second_round=False)), XrpoNovelty()]
    stack = stack_of(*parts)
    solved(stack, 4)
    rewards = [[0.0] * 4 + [1.0, 0.0], [1.0, 0.0] * 4, [1.0]]
    rollouts, _ = generated(stack, rewards, 8)
    alone, _ = generated(allocating(8), rewards, 8)
    assert torch.equal(rollouts.group, alone.group) and len(rollouts) == 24
    prompts = shown(rollouts, 0)
    assert prompts[:4] == [TEXTS[0]] * 4 and "Solution:\nsolution of 4" in prompts[4]
    base = grpo_advantages(rollouts)
    decision = one_step(stack, rollouts)
    up = decision.row_advantages - base
    assert float(up.min()) >= -1e-12 and float(up.max()) > 0.01
    assert bool((up[base <= 0] == 0).all()) and bool((up <= 0.5 * base.clamp(min=0) + 1e-12).all())
    assert set(stack.methods[1].state["answers"]) == {"4", "0", "1", "2"}
    assert prompt_text(TEXTS[0]) == TEXTS[0]
