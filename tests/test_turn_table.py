"""The table of turns, against a loop over rows and turns."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import MethodError
from rl_plugins.core.requests import Turn
from rl_plugins.kit.agents.turns import Turns
from rl_plugins.runtime import turn_table as module
from rl_plugins.runtime.turn_table import FlatTurns, spans
from rl_plugins.testing import make_rollouts, make_tokens


def turn_table(rollouts, turns):
    return module.turn_table(rollouts, in_parts(turns))


def token_turns(row, position, turns):
    return module.token_turns(row, position, in_parts(turns))


def in_parts(turns):
    """As two ranks send them."""
    half = len(turns) // 2
    return FlatTurns.cat([FlatTurns.of(turns[:half]), FlatTurns.of(turns[half:])])


@settings(deadline=None)  # a busy machine
@given(st.lists(st.integers(0, 1), max_size=30))
def test_spans_are_the_runs_of_trained_tokens(mask):
    found = spans(mask)
    covered = [i for t in found for i in range(t.start, t.stop)]
    assert covered == [i for i, m in enumerate(mask) if m]
    assert all(t.start == 0 or not mask[t.start - 1] for t in found)
    assert all(t.stop == len(mask) or not mask[t.stop] for t in found)


def test_spans_take_what_is_known():
    first, second, third = spans([1, 1, 0, 1, 0, 1], ["a", "b"], [1.0])
    assert (first.anchor, second.anchor, third.anchor) == ("a", "b", None)
    assert first.reward == 1.0 and math.isnan(second.reward)


@settings(deadline=None)  # a busy machine
@given(st.data())
def test_turns_are_numbered_along_their_rollout(data):
    """Rows of a rollout in any order in the batch, with any number of turns each."""
    n = data.draw(st.integers(1, 12))
    group = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    rollout = data.draw(st.lists(st.integers(0, 2), min_size=n, max_size=n))
    seen: dict[tuple[int, int], int] = {}
    index = []
    for key in zip(group, rollout, strict=True):
        index.append(seen.get(key, 0))
        seen[key] = index[-1] + 1
    order = data.draw(st.permutations(range(n)))
    group, rollout, index = ([x[i] for i in order] for x in (group, rollout, index))
    turns = []
    for row in range(n):
        places = iter(range(0, 40, 4))
        turns.append(
            [Turn(p, p + 3, (row, p)) for p, _ in zip(places, range(data.draw(st.integers(0, 3))), strict=False)]
        )
    rollouts = make_rollouts([1.0] * n).replace(
        group=torch.tensor(group), rollout=torch.tensor(rollout), index=torch.tensor(index)
    )
    at = [(row, p) for row in range(n) for t in turns[row] for p in range(t.start, t.stop)]
    row, position = torch.tensor(at or [(0, 0)]).long().T[:, : len(at)]
    tokens = make_tokens(rollouts)
    tokens = tokens.replace(
        **{
            k: (v[:1].repeat(len(at)) if len(v) else v[:0])
            for k, v in vars(tokens).items()
            if isinstance(v, torch.Tensor)
        }
    ).replace(row=row, position=position)
    filled = rollouts.replace(turns=turn_table(rollouts, turns))
    shaped = tokens.replace(turn=token_turns(row, position, turns))
    number = 0
    for r in range(n):
        for k, t in enumerate(turns[r]):
            earlier = sum(
                len(turns[q])
                for q in range(n)
                if (group[q], rollout[q]) == (group[r], rollout[r]) and index[q] < index[r]
            )
            assert int(filled.turns.row[number]) == r and int(filled.turns.turn[number]) == earlier + k
            assert filled.turns.anchor[number] == (r, t.start)
            mine = (row == r) & (position >= t.start) & (position < t.stop)
            assert bool((shaped.turn[mine] == number).all()) and int(mine.sum()) == 3
            number += 1
    if number:
        assert len(Turns(filled).group) == number


def test_a_token_outside_of_every_turn_is_an_error():
    for at in ((0, 3), (1, 0), (0, 9)):
        with pytest.raises(MethodError, match="outside of every turn"):
            token_turns(torch.tensor([at[0]]), torch.tensor([at[1]]), [[Turn(0, 3), Turn(4, 6)], []])
    assert token_turns(torch.tensor([0, 0]), torch.tensor([2, 4]), [[Turn(0, 3), Turn(4, 6)], []]).tolist() == [0, 1]


# ---- what mutants showed was not asked


def test_a_turn_keeps_its_reward_and_whether_it_was_understood():
    rollouts = make_rollouts([1.0, 0.0])
    table = turn_table(rollouts, [[Turn(0, 1, reward=0.1, valid=False), Turn(1, 2)], [Turn(0, 1, "x", 1 / 3)]])
    assert table.reward.dtype == torch.float64 and table.reward.tolist()[::2] == [0.1, 1 / 3]
    assert math.isnan(table.reward[1]) and table.anchor == [None, None, "x"]
    assert table.valid.dtype == torch.bool and table.valid.tolist() == [False, True, True]


@pytest.mark.parametrize("rows", [0, 2])
def test_a_batch_without_a_turn_has_an_empty_table(rows):
    table = turn_table(make_rollouts([1.0] * rows), [[]] * rows)
    assert [len(x) for x in (table.row, table.turn, table.anchor, table.reward, table.valid)] == [0] * 5
    assert (table.row.dtype, table.turn.dtype) == (torch.int64, torch.int64)
    assert (table.reward.dtype, table.valid.dtype) == (torch.float64, torch.bool)
    nothing = torch.empty(0, dtype=torch.int64)
    assert token_turns(nothing, nothing, [[]] * rows).tolist() == []
    assert token_turns(nothing, nothing, [[Turn(0, 1)]]).dtype == torch.int64


def test_a_token_without_any_turn_in_the_batch_is_an_error():
    with pytest.raises(MethodError, match="a trained token lies outside of every turn"):
        token_turns(torch.tensor([0]), torch.tensor([0]), [[], []])


def test_many_rows_of_many_rollouts_are_numbered_in_their_order():
    """So many that a sort that is not stable would mix rows of one rollout."""
    n, k = 400, 8
    rollouts = make_rollouts([1.0] * n).replace(
        group=torch.zeros(n, dtype=torch.int64), rollout=torch.arange(n) % k, index=torch.arange(n) // k
    )
    table = turn_table(rollouts, [[Turn(0, 1), Turn(1, 2)]] * n)
    assert table.turn.tolist() == [2 * (r // k) + t for r in range(n) for t in (0, 1)]


@pytest.mark.parametrize("rows", [1, 5, 20, 400])
def test_a_turn_without_a_token_takes_none_from_the_next(rows):
    """An agent loop of a user may mark turns in which nothing was said."""
    turns = [[Turn(0, 2), Turn(2, 2), Turn(2, 4)]] * rows
    row, position = torch.arange(rows).repeat_interleave(4), torch.arange(4).repeat(rows)
    assert token_turns(row, position, turns).tolist() == [3 * r + k for r in range(rows) for k in (0, 0, 2, 2)]
