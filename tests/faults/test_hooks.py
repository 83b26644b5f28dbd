"""Misbehaving hooks: a share of the cases of hooks.py, those that it found first, and who looks for changes."""

from __future__ import annotations

import hooks
import pytest

from rl_plugins.core.errors import MethodError
from rl_plugins.core.method import HOOKS
from rl_plugins.runtime.immutability import changes, checking, watched
from rl_plugins.testing import make_rollouts
from rl_plugins.testing.data import make_token_ids


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
    "plan": {"plans group 10**30", "plans spare huge", "plans given None", "raises an exception without a text"},
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


def test_only_a_check_and_a_debugged_run_look(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = make_rollouts([0.5] * 4)
    monkeypatch.delenv("RL_PLUGINS_DEBUG", raising=False)
    stack = hooks.bad("rewards", lambda self, rollouts: rollouts.reward.add_(1))
    assert watched((rollouts,)) == []
    assert stack.one("rewards", rollouts) is rollouts.reward
    with checking(), pytest.raises(MethodError, match="`Rollouts.reward`"):
        stack.one("rewards", rollouts)
    for value, looks in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("RL_PLUGINS_DEBUG", value)
        assert bool(watched((rollouts,))) is looks


def test_a_storage_is_looked_at_once_and_as_a_whole() -> None:
    """However many rows are views of it, and wherever in it something changes."""
    rollouts = make_rollouts([0.5] * 512, lengths=[64] * 512)
    ids = make_token_ids(rollouts)
    with checking():
        count = len(watched((rollouts.replace(token_ids=ids),))) - len(watched((rollouts,)))
        assert count == 10, "two looks each at five flat tensors, however many rows there are"
        before = watched((list(ids.completion),))
        assert len(before) == 1 + 512 + 1, "the list, a count of writes each, and one checksum"
        ids.completion[300].numpy()[7] += 1  # a write that torch does not see
        assert len(changes(before)) == 1
