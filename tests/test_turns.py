"""Turns in time order, discounted returns, equal observations; and the turns that `rl_plugins.testing` makes."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import MethodError
from rl_plugins.core.groups import Groups
from rl_plugins.kit.agents.turns import Turns, canonical_form, joint, normalized, state_ids
from rl_plugins.testing import make_rollouts, make_tokens, make_turns, one_row_per_turn

NAN = math.nan


def equal(a, b) -> bool:
    ids = state_ids([a, b]).tolist()
    return ids[0] == ids[1]


# ---- observations

SAME = [
    ("room", np.str_("room")),
    (1, 1.0),
    (True, np.float32(1)),
    (0.0, -0.0),
    (NAN, np.float64("nan")),
    (2**53, 2.0**53),
    (2**60, np.int64(2**60)),
    ([1, 2.5], (1.0, 2.5)),
    ([1, 2, 3], np.array([1, 2, 3], dtype=np.uint8)),
    ([1, 2**60], np.array([1, 2**60])),
    ([True, 0], torch.tensor([1.0, 0.0], dtype=torch.bfloat16)),
    ([[1, 2], [3, 4]], np.array([[1, 2], [3, 4]])),
    ([[], []], np.zeros((2, 0))),
    (["a", "b"], np.array(["a", "b"])),
    ({"x": 1, "y": [2, "z"]}, {"y": (2.0, "z"), "x": True}),
    ({1, 2, 3}, frozenset((3, 2, 1.0))),
]
DIFFERENT = [
    ("room", "Room"),
    ("room", b"room"),
    ("1", 1),
    (1, [1]),
    (2**53, 2**53 + 1),
    (2.0**60, 2**60 + 1),
    ([1, 2**60], [1, 2**60 + 1]),
    ([1, 2], [2, 1]),
    (["ab", "c"], ["a", "bc"]),
    (["a", ["b"]], [["a"], "b"]),
    ([1, 2, 3, 4], np.array([[1, 2], [3, 4]])),
    (np.zeros((2, 3)), np.zeros((3, 2))),
    ({"x": 1}, {"x": 2}),
    ({"x": 1}, [["x", 1]]),
    ({"x": {"y": 1}, "z": 2}, {"x": {"y": 1, "z": 2}}),
    ("", []),
    (0, ""),
    (None, None),
    (None, ""),
]


@pytest.mark.parametrize(("a", "b"), SAME, ids=range(len(SAME)))
def test_equal_observations_have_equal_numbers(a, b):
    assert equal(a, b) and equal([a, "x"], [b, "x"]) and equal({"k": a}, {"k": b})


@pytest.mark.parametrize(("a", "b"), DIFFERENT, ids=range(len(DIFFERENT)))
def test_different_observations_have_different_numbers(a, b):
    assert not equal(a, b)


plain = st.recursive(
    st.one_of(st.text(max_size=3), st.integers(-3, 3), st.booleans(), st.floats(-2, 2, width=16)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abc"), inner, max_size=3), st.tuples(inner, inner)
    ),
    max_leaves=6,
)


def as_lists(value):
    if isinstance(value, (list, tuple)):
        return [as_lists(v) for v in value]
    return {k: as_lists(v) for k, v in value.items()} if isinstance(value, dict) else value


@settings(max_examples=60, deadline=None)
@given(a=plain, b=plain)
def test_canonical_forms_are_equal_exactly_where_python_says_so(a, b):
    assert (canonical_form(a) == canonical_form(b)) == (as_lists(a) == as_lists(b))


def test_numbers_of_observations_are_the_same_in_every_process():
    observations = ["room", 3, [1.5, "x"], {"b": 1, "a": {"x", "y", "z"}}, {"a", "b", "c"}]
    code = f"from rl_plugins.kit.agents.turns import state_ids; print(state_ids({observations!r}).tolist())"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed}
        ).stdout
        for seed in ("1", "2")
    ]
    assert runs[0] == runs[1] == f"{state_ids(observations).tolist()}\n"
    assert state_ids(["room", 3]).tolist() == [-8352345000260582269, -5770907377417606792]  # and in every version


def test_texts_that_come_again_have_the_number_they_have_alone():
    texts = ["room", "Room", "".join(["ro", "om"]), np.str_("room"), "", None, ["room"], "room", None]
    ids = state_ids(texts).tolist()
    assert [ids.index(i) for i in ids] == [0, 1, 0, 0, 4, 5, 6, 0, 8]
    assert ids[:3] == [state_ids([t]).item() for t in texts[:3]]


def test_an_observation_whose_equality_is_its_address_is_refused():
    for value in (object(), [object()], {"x": object()}, 1j, np.array([object()])):
        with pytest.raises(MethodError, match="cannot be compared the same way in every process"):
            state_ids([value])


# ---- time


def turns_of(anchors, rewards=None, outcome=None, group=None, **changes):
    outcome = [float(i) for i in range(len(anchors))] if outcome is None else outcome
    return make_rollouts(outcome, group or [0] * len(anchors), turns=make_turns(anchors, rewards), **changes)


def shuffled(rollouts, seed):
    """The same turns, listed in another order, and that order."""
    s = rollouts.turns
    order = torch.from_numpy(np.random.default_rng(seed).permutation(len(s.row)))
    anchors = [s.anchor[i] for i in order]
    steps = s.replace(
        row=s.row[order], turn=s.turn[order], anchor=anchors, reward=s.reward[order], valid=s.valid[order]
    )
    return rollouts.replace(turns=steps), order


@settings(max_examples=40, deadline=None)
@given(
    rewards=st.lists(
        st.lists(st.one_of(st.just(NAN), st.sampled_from([0.0, 1.0, 10.0, -0.3])), max_size=9), min_size=1, max_size=6
    ),
    gamma=st.sampled_from([0.0, 0.5, 0.95, 1.0]),
    seed=st.integers(0, 5),
)
def test_returns_equal_the_loop_from_the_last_turn_to_the_first(rewards, gamma, seed):
    expected = []
    for i, of_rollout in enumerate(rewards):
        given_rewards = [0.0 if math.isnan(r) else r for r in of_rollout]
        if of_rollout and all(map(math.isnan, of_rollout)):
            given_rewards[-1] = float(i)  # no reward of the environment: that of the rollout
        g, of_this = 0.0, []
        for r in reversed(given_rewards):
            g = r + gamma * g
            of_this.insert(0, g)
        expected += of_this
    anchors = [["x"] * len(r) for r in rewards]
    rollouts, order = shuffled(turns_of(anchors, rewards), seed)
    result = Turns(rollouts).returns(gamma)
    assert result.tolist() == pytest.approx([expected[i] for i in order], rel=1e-12, abs=1e-12)


def test_returns_of_long_rollouts_and_of_a_single_one():
    turns = Turns(turns_of([["x"] * 1000, ["x"]], [[1.0] * 1000, [2.0]]))
    g = turns.returns(0.9)
    assert g[0] == pytest.approx((1 - 0.9**1000) / 0.1) and g[998] == pytest.approx(1.9) and g[1000] == 2.0


def test_unscorable_rows_have_no_return_and_do_not_spoil_those_of_others():
    rollouts = turns_of([["a", "b"], ["a", "b"]], [[0, 1], [0, 1]], outcome=[NAN, 1.0])
    assert Turns(rollouts).returns(0.5).tolist() == pytest.approx([NAN, NAN, 0.5, 1.0], nan_ok=True)
    rows, _ = one_row_per_turn(rollouts, make_tokens(rollouts))
    last_unknown = rows.replace(reward=torch.tensor([1.0, NAN, 1.0, 1.0], dtype=torch.float64))
    assert Turns(last_unknown).returns(0.5).tolist() == pytest.approx([0.5, NAN, 0.5, 1.0], nan_ok=True)


def test_rollouts_with_the_same_number_in_two_groups_are_two():
    rollouts = turns_of([["a", "b"], ["c"], ["d"]], [[1, 1], [1], [1]], group=[5, 5, 2])
    turns = Turns(rollouts)
    assert rollouts.rollout.tolist() == [0, 1, 0] and len(set(turns.rollout.tolist())) == 3
    assert turns.group.tolist() == [5, 5, 5, 2] and turns.before.tolist() == [0, 1, 0, 0]
    assert turns.returns(1.0).tolist() == [2.0, 1.0, 1.0, 1.0]


def test_states_of_earlier_turns():
    rollouts, order = shuffled(turns_of([["a", "b", "c"], ["d"], ["e", "f"]]), 3)
    turns = Turns(rollouts)
    x = torch.tensor([1, 2, 3, 4, 5, 6])[order]
    for k, expected in enumerate([[1, 2, 3, 4, 5, 6], [-1, 1, 2, -1, -1, 5], [-1, -1, 1, -1, -1, -1], [-1] * 6]):
        assert turns.earlier(x, k).tolist() == [expected[i] for i in order]


def test_rollouts_without_turns_are_an_error_that_says_what_to_do():
    with pytest.raises(MethodError, match='names "turns" in `needs`'):
        Turns(make_rollouts([1.0]))


def test_a_batch_without_any_turn():
    rollouts = turns_of([[], []])
    assert Turns(rollouts).returns(0.9).shape == (0,) and Turns(rollouts).earlier(torch.zeros(0).long(), 1).shape == (
        0,
    )


def test_joint_keys():
    a, b = torch.tensor([7, -3, 7, 7, -3]), torch.tensor([1, 1, 2, 1, 9])
    assert joint(a, b).tolist() == [2, 0, 3, 2, 1]
    assert joint(b).tolist() == [0, 0, 1, 0, 2]


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(*[st.sampled_from([0, 1, 2, -5, 10**6, 2**62, -(2**62)])] * 3), min_size=1, max_size=12))
def test_joint_keys_are_numbered_in_their_order(rows):
    columns = torch.tensor(rows).T
    order = sorted(set(rows))
    assert joint(*columns).tolist() == [order.index(r) for r in rows]


def test_normalized_differences():
    x = torch.tensor([1.0, 3.0, 5.0, NAN], dtype=torch.float64)
    groups = Groups(torch.tensor([0, 0, 1, 0]))
    assert normalized(x, groups, False, 1e-6).tolist() == pytest.approx([-1, 1, 0, NAN], nan_ok=True)
    assert normalized(x, groups, True, 0.5).tolist()[:2] == pytest.approx([-1 / (2**0.5 + 0.5), 1 / (2**0.5 + 0.5)])
    assert normalized(x, groups, True, 0.5, ddof=0).tolist()[:3] == pytest.approx([-1 / 1.5, 1 / 1.5, 0])
    of = torch.tensor([1.0, NAN, 4.0, NAN], dtype=torch.float64)
    assert normalized(x, groups, False, 0.5, of=of).tolist()[:3] == [0.0, 2.0, 1.0]


# ---- turns made for tests


def test_turns_are_made_in_both_layouts():
    nested = dict(anchor=[["a", "b"], [], ["c"]], reward=[[0, 1], [], [NAN]], valid=[[True, False], [], [True]])
    steps = make_turns(**nested)
    assert (steps.row.tolist(), steps.turn.tolist(), steps.anchor) == ([0, 0, 2], [0, 1, 0], ["a", "b", "c"])
    assert steps.reward.tolist()[:2] == [0, 1] and steps.valid.tolist() == [True, False, True]
    assert make_turns(**nested, row_per="turn").row.tolist() == [0, 1, 2]
    defaults = make_turns([["a"]])
    assert math.isnan(defaults.reward[0]) and defaults.valid.tolist() == [True]
    with pytest.raises(ValueError, match=r"\[1\] entries per rollout for \[2\] turns"):
        make_turns([["a", "b"]], [[1.0]])


def test_tokens_are_dealt_to_turns_in_order():
    rollouts, order = shuffled(turns_of([["a", "b"], ["c"], ["d", "e", "f"]], lengths=[5, 2, 2]), 1)
    tokens = make_tokens(rollouts)
    assert [rollouts.turns.anchor[i] for i in tokens.turn] == ["a", "a", "a", "b", "b", "c", "c", "d", "e"]
    with pytest.raises(ValueError, match="a row with tokens has no turn"):
        make_tokens(turns_of([["a"], []]))


def test_a_row_per_turn_holds_the_same_rollouts():
    rollouts = turns_of(
        [["a", "b"], ["c"]], group=[4, 6], lengths=[5, 2], text=["x", "y"], truncated=torch.tensor([True, False])
    )
    tokens = make_tokens(rollouts)
    rows, by_turn = one_row_per_turn(rollouts, tokens)
    assert (rows.group.tolist(), rows.rollout.tolist(), rows.index.tolist()) == ([4, 4, 6], [0, 0, 0], [0, 1, 0])
    assert rows.length.tolist() == [3, 2, 2] and rows.reward.tolist() == [0, 0, 1] and rows.text == ["x", "x", "y"]
    assert rows.truncated.tolist() == [False, True, False] and rows.turns.row.tolist() == [0, 1, 2]
    assert rows.reward_names == rollouts.reward_names and rows.rewards.shape == (3, 1)
    assert by_turn.row.tolist() == [0, 0, 0, 1, 1, 2, 2] and by_turn.position.tolist() == [0, 1, 2, 0, 1, 0, 1]
    assert torch.equal(by_turn.old_logprobs, tokens.old_logprobs) and torch.equal(by_turn.turn, tokens.turn)
    with pytest.raises(ValueError, match="are needed to make a row of every turn"):
        one_row_per_turn(make_rollouts([1.0]), make_tokens(make_rollouts([1.0])))
