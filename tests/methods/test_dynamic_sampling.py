"""Dynamic sampling of DAPO (arXiv 2503.14476): rounds and the batch that is trained, against a plain loop."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.rollouts import Completion, PlanRow, Rollouts
from rl_plugins.methods.dynamic_sampling import DynamicSampling
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.report import plan_lines
from rl_plugins.runtime.rounds import Rounds
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_rollouts, make_run, one_step, start_stack

NAN, SIZE = math.nan, 4


def begin(size: int = 40, seed: int = 0, **params: Any) -> MethodStack:
    return start_stack(DynamicSampling(DynamicSampling.Params(**params)), seed=seed, run=make_run(dataset_size=size))


def batch(stack: MethodStack, reward: Any, prompts: int = 3, size: int = 40, given: int = 0) -> tuple[Any, Rollouts]:
    """Plan rows of each round, and the rollouts of all; `reward(prompt, number)`. The last `given` prompts have given
    completions."""
    rows = list(first_plan(stack, range(prompts), SIZE, prompts * SIZE, size).rows)
    for k in range(given):
        row = PlanRow(prompts - 1 - k, prompts - 1 - k, SIZE, given=(Completion((1,)),) * SIZE)
        rows[row.group] = row
    rounds, account = [rows], Rounds(stack, rows, SIZE, prompts * SIZE, size)
    while True:
        flat = [row for row in account.rows for _ in range(row.n + row.spare)]
        group = [row.group for row in flat]
        number = [group[:i].count(g) for i, g in enumerate(group)]
        rewards = [reward(row.prompt_index, k) for row, k in zip(flat, number, strict=True)]
        prompt = [row.prompt_index for row in flat]
        rollouts = make_rollouts(rewards, group, prompt_index=prompt, payload=[row.payload for row in flat])
        more = account.more(rollouts.group, rollouts.reward)
        if not more:
            return rounds, rollouts.replace(batch=stack.batch)
        rounds.append(list(more))


def unequal(rewards: list[float]) -> bool:
    known = [x for x in rewards if x == x]
    return bool(known) and max(known) != min(known)


value = st.sampled_from([0.0, 0.0, 1.0, NAN])


@settings(max_examples=30, deadline=None)
@given(
    table=st.lists(st.lists(value, min_size=SIZE, max_size=SIZE), min_size=12, max_size=12),
    seed=st.integers(0, 3),
    max_rounds=st.integers(1, 4),
    refill=st.sampled_from([1.0, 1.5, 3.0]),
)
def test_equals_the_loop(table, seed, max_rounds, refill):
    stack = begin(12, seed, max_rounds=max_rounds, refill=refill)
    rounds, rollouts = batch(stack, lambda p, k: table[p][k], size=12)
    asked = [[row.prompt_index for row in rows] for rows in rounds]
    assert asked[0] == [0, 1, 2] and all((row.n, row.spare) == (0, SIZE) for rows in rounds for row in rows)
    order = [p for prompts in asked for p in prompts]
    assert len(set(order)) == len(order)
    for t in range(1, len(asked) + 1):  # what a further round asks for, and when there is none
        had = [p for prompts in asked[:t] for p in prompts]
        missing = 3 - sum(unequal(table[p]) for p in had)
        want = min(math.ceil(refill * missing), 12 - len(had)) if missing > 0 and t <= max_rounds else 0
        assert len(asked[t] if t < len(asked) else []) == want
    trained = [p for p in order if unequal(table[p])][:3]
    decision = one_step(stack, rollouts, budget=3 * SIZE)
    kept = decision.rollouts.prompt_index[decision.rollouts.kept].tolist()
    assert kept == [p for p in trained for _ in range(SIZE)]
    logged = combine([stack.metrics.take()])
    assert logged["dynamic_sampling/rounds"] == len(asked)
    assert logged["dynamic_sampling/filled"] == pytest.approx(len(trained) / 3)
    assert logged["dynamic_sampling/signal"] == pytest.approx(sum(unequal(table[p]) for p in order) / len(order))
    if trained:
        assert logged["dynamic_sampling/rollouts_per_row"] == pytest.approx(len(order) / len(trained))


def test_a_batch_with_signal_is_trained_as_it_is():
    stack = begin()
    rounds, rollouts = batch(stack, lambda p, k: float(k == 0))
    assert len(rounds) == 1 and bool(one_step(stack, rollouts, budget=12).trained.all())


def test_further_prompts_are_the_same_after_a_resume_and_others_with_another_seed():
    def asked(seed: int) -> list[int]:
        return [row.prompt_index for row in batch(begin(seed=seed), lambda p, k: float(p > 2 and k == 0))[0][1]]

    assert asked(0) == asked(0) != asked(1) and len(asked(0)) == 3 and min(asked(0)) > 2


def test_a_threshold_asks_for_successes_and_failures():
    """Graded rewards nearly always differ."""
    stack = begin(success_threshold=1.0)
    rounds, rollouts = batch(stack, lambda p, k: k / 10 + float(p > 2 and k == 0))
    assert len(rounds) == 2 and one_step(stack, rollouts, budget=12).trained.tolist() == [False] * 12 + [True] * 12


def test_given_groups_are_neither_judged_nor_refilled():
    stack = begin()
    rounds, rollouts = batch(stack, lambda p, k: 1.0 if p == 2 else float(k == 0), given=1)
    assert len(rounds) == 1 and bool(one_step(stack, rollouts, budget=12).rollouts.kept.all())


def test_a_pivot_of_another_method_is_made_in_further_rounds_too():
    stack = build_stack(["mc_grpo", "dynamic_sampling"])
    stack.start(make_run(dataset_size=40))
    rounds, rollouts = batch(stack, lambda p, k: float(p > 2 and k == 0))
    assert {(row.n, row.spare) for rows in rounds for row in rows} == {(0, SIZE + 1)} and len(rounds) == 2
    assert int(one_step(stack, rollouts, budget=12).trained.sum()) == 12


def test_what_another_method_took_out_gives_no_signal():
    stack = begin()
    _, rollouts = batch(stack, lambda p, k: float(k == 0))
    kept = rollouts.rollout > 0  # the only success of each group has left
    method = stack.methods[0]
    assert not bool(method.select(rollouts.replace(kept=kept)).any())
    assert torch.equal(method.select(rollouts), torch.ones(12, dtype=torch.bool))


def test_a_dry_run_tells_the_most_rounds_and_rollouts_and_a_batch_without_signal_takes_them():
    stack = begin(max_rounds=3, refill=1.5)
    plan = first_plan(stack, range(3), SIZE, 3 * SIZE, 40)
    told = dict(plan_lines(stack, plan, 3 * SIZE, "3"))["rounds"]
    rounds, rollouts = batch(stack, lambda p, k: 0.0)
    assert re.findall(r"[\d.]+", told) == [str(len(rounds)), str(len(rollouts)), f"{len(rollouts) / 12:.3g}"]
