"""`rollouts.py`: rollouts of several rows count once, and old names tell the new ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.requests import Prompt
from rl_plugins.core.rollouts import Carried, Plan, PlanRow, PromptPool, Queue, Rollouts, Run, Tokens
from rl_plugins.runtime import registry
from rl_plugins.testing import make_plan, make_rollouts, make_run, make_tokens


@given(st.integers(0, 12), st.integers(0, 2**32 - 1))
def test_each_rollout_once_equals_a_loop(rollouts, seed):
    rng = np.random.default_rng(seed)
    keys = [(int(rng.integers(3)) * 5, k) for k in range(rollouts)]  # group numbers with gaps
    rows = [(g, k, i) for g, k in keys for i in range(int(rng.integers(1, 4)))]
    rows = [rows[i] for i in rng.permutation(len(rows))]
    reward = [math.nan if rng.random() < 0.3 else float(rng.random()) for _ in rows]
    group = [g for g, _, _ in rows]
    made = make_rollouts(
        reward,
        group,
        prompt_index=[100 + g for g in group],
        rollout=torch.tensor([k for _, k, _ in rows], dtype=torch.int64),
        index=torch.tensor([i for _, _, i in rows], dtype=torch.int64),
    )
    once = made.per_rollout
    found = sorted(set(keys))
    assert list(zip(once.group.tolist(), once.rollout.tolist(), strict=True)) == found
    assert once.prompt_index.tolist() == [100 + g for g, _ in found]
    of = [found.index((g, k)) for g, k, _ in rows]
    assert once.rows.index.tolist() == of
    for n, key in enumerate(found):
        mine = sorted((i, r) for r, (g, k, i) in enumerate(rows) if (g, k) == key)
        scored = [reward[r] for _, r in mine if not math.isnan(reward[r])]
        assert once.last[n] == mine[-1][1]
        if scored:
            assert float(once.reward[n]) == pytest.approx(sum(scored) / len(scored), abs=1e-12)
            share = once.row_weight(made.reward)
            assert all(float(share[r]) == 1 / len(scored) for _, r in mine)
        else:
            assert math.isnan(float(once.reward[n]))
    if rows:
        assert once.groups.ids.tolist() == made.groups.ids.tolist()
    keep = torch.from_numpy(rng.random(len(rows)) < 0.7)
    wanted: dict[int, list[list[int]]] = {}
    for key in found:
        mine = [r for _, r in sorted((i, r) for r, (g, k, i) in enumerate(rows) if (g, k) == key) if bool(keep[r])]
        if mine:
            wanted.setdefault(key[0], []).append(mine)
    assert once.members(made, keep) == wanted


def test_a_rollout_of_one_row_is_that_row():
    made = make_rollouts([1.0, 0.0, math.nan, 0.5], group_size=2)
    assert torch.equal(made.per_rollout.last, torch.arange(4)) and made.per_rollout.rows.index.tolist() == [0, 1, 2, 3]
    assert (
        made.per_rollout.row_weight(made.reward).tolist()[:2] == [1, 1]
        and made.per_rollout.rows.size.tolist() == [1] * 4
    )


OLD = [
    (lambda: make_rollouts([1.0]).step, "Rollouts.step", "batch"),
    (lambda: make_rollouts([1.0]).steps, "Rollouts.steps", "turns"),
    (lambda: make_tokens(make_rollouts([1.0])).step, "Tokens.step", "turn"),
    (lambda: make_plan().step, "Plan.step", "batch"),
    (lambda: make_plan().rows[0].prompt, "PlanRow.prompt", "prompt_index"),
    (lambda: PlanRow(prompt=1, group=0, n=1), "PlanRow.prompt", "prompt_index"),
    (lambda: make_rollouts([1.0], step=3), "Rollouts.step", "batch"),
    (lambda: make_plan().replace(step=3), "Plan.step", "batch"),
    (lambda: make_run().generation_steps, "Run.generation_steps", "total_batches"),
    (lambda: PromptPool(1, (), (), None, 0).step, "PromptPool.step", "batch"),
    (lambda: Queue((), 1, 1, 0).step, "Queue.step", "batch"),
    (lambda: Carried(1, 1, 0, (), (), ()).prompt, "Carried.prompt", "prompt_index"),
    (lambda: Prompt((1,), "x", {}, 1, 1, 1, None).step, "Prompt.step", "batch"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("use", "old", "new"), OLD, ids=[f"{old} {i}" for i, (_, old, _) in enumerate(OLD)])
def test_an_old_name_is_an_error_that_tells_the_new_one(use, old, new):
    with pytest.raises(MethodError, match=rf"`{old}` is called `{new}` now"):
        use()


def test_records_keep_their_fields_and_equality():
    assert PlanRow(1, 0, 2) == PlanRow(prompt_index=1, group=0, n=2) != PlanRow(1, 0, 3)
    assert Plan((), 4, 8, batch=3).replace(round=1) == Plan((), 4, 8, round=1, batch=3)
    for cls, old in ((Rollouts, "step"), (Tokens, "step"), (Run, "generation_steps")):
        assert old not in cls.__dataclass_fields__


def test_an_old_signal_is_refused_when_the_class_is_loaded():
    class Mine(Method):
        name = "mine"
        fidelity = "paper"
        needs = frozenset({"steps"})

    with pytest.raises(ConfigError, match='`mine` needs the signal "steps", which is called "turns" now'):
        registry.check_class(Mine, "mine", "here")
