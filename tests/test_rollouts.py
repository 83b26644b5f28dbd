"""`rollouts.py`: rollouts of several rows count once, and old names tell the new ones."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rl_plugins.core.rollouts import Plan, PlanRow
from rl_plugins.testing import make_rollouts


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
    of_lists = make_rollouts([1.0, 0.0], group_size=2, length=[2, 4], truncated=[True, False])
    assert of_lists.groups.mean(of_lists.length).tolist() == [3.0] and of_lists.truncated.dtype == torch.bool
    made = make_rollouts([1.0, 0.0, math.nan, 0.5], group_size=2)
    assert torch.equal(made.per_rollout.last, torch.arange(4)) and made.per_rollout.rows.index.tolist() == [0, 1, 2, 3]
    assert (
        made.per_rollout.row_weight(made.reward).tolist()[:2] == [1, 1]
        and made.per_rollout.rows.size.tolist() == [1] * 4
    )


def test_records_keep_their_fields_and_equality():
    assert PlanRow(1, 0, 2) == PlanRow(prompt_index=1, group=0, n=2) != PlanRow(1, 0, 3)
    assert Plan((), 4, 8, batch=3).replace(round=1) == Plan((), 4, 8, round=1, batch=3)
