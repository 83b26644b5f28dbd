"""Misbehaving hooks: a share of the cases of hooks.py, those that it found first, and what a check costs."""

from __future__ import annotations

import time

import hooks
import pytest

from rl_plugins.core.method import HOOKS
from rl_plugins.runtime.immutability import changes, watched
from rl_plugins.testing import make_rollouts, make_tokens


def test_no_hook_misbehaves_without_being_named() -> None:
    """Every sixth case; all of them by `python tests/faults/hooks.py`."""
    chosen = list(hooks.cases())
    hooks.HOLES.clear()
    table = hooks.attack(chosen[::6])
    assert not [(case.place, case.what, found) for case, found in hooks.HOLES]
    assert len(chosen) > 1900 and all(counts[hooks.NAMED] > 3 for counts in table.values())
    assert {hook for hook, _ in hooks.DRIVES.values()} == {*HOOKS, "start"}


FOUND = {
    "rollout": {
        "yields stop text",
        "yields n text",
        "yields Generate of None",
        "yields None",
        "returns None",
        "a row with tokens out of the vocabulary",
        "a row with rewards infinite",
        "raises StopIteration",
        "changes argument 0.payload[hint]",
    },
    "select_prompts": {"without an end", "returns an object that raises"},
    "plan": {"plans group 10**30", "plans spare huge", "plans given None", "raises an exception whose text exits"},
    "plan, round 1": {"plans prompt of another dataset"},
    "observe": {"returns a generator", "changes argument 0.meta[numbers][0]", "changes argument 2"},
    "rewards": {"returns 1e38", "changes argument 0.reward behind torch", "logs complex"},
    "advantages": {"returns 1e38", "returns a nested tensor", "changes argument 0.turns.anchor[0]"},
    "shape": {"row_columns 1e300", "advantages 1e38", "row_columns None", "advantages an object that raises"},
    "before_update": {"lr_scale 1e300", "columns 1e300", "lr_scale a complex tensor", "changes argument 0.columns"},
    "policy_loss": {"NaN gradient", "NaN gradient at masked tokens", "another graph", "on no device", "complex"},
    "admit": {"fresh huge", "resume that raises"},
    "regularize": {"NaN gradient at masked tokens", "complex", "changes argument 0.columns"},
}


def test_what_was_found_is_named() -> None:
    found = {(case.place, case.what): case for case in hooks.cases()}
    for place, what in sorted((p, w) for p, names in FOUND.items() for w in names):
        assert hooks.outcome(found[place, what]) == hooks.NAMED, (place, what)


@pytest.mark.parametrize("rows", [1024])
def test_to_watch_what_a_hook_is_given_costs_nothing_measurable(rows: int) -> None:
    """A thousand rows of a thousand tokens with their texts, whose generation takes minutes."""
    rollouts = make_rollouts([0.5] * rows, lengths=[1000] * rows, messages=[[{"content": "x" * 4000}]] * rows)
    tokens = make_tokens(rollouts)
    best = []
    for _ in range(5):
        start = time.process_time()
        assert changes(watched((rollouts, tokens, {"x": 1.0}))) == []
        best.append(time.process_time() - start)
    assert min(best) < 0.05, best
