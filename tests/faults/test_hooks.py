"""Misbehaving hooks: a share of the cases of hooks.py, those that it found first, and who looks for changes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import hooks
import pytest
import torch

from rl_plugins import testing
from rl_plugins.core.errors import ConfigError, MethodError, StateError
from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.method import HOOKS, Method, from_params
from rl_plugins.core.params import MethodParams, param
from rl_plugins.core.requests import Generate
from rl_plugins.core.rollouts import Shape
from rl_plugins.methods.latr import Latr
from rl_plugins.runtime import registry
from rl_plugins.runtime.decide import decide
from rl_plugins.runtime.immutability import changes, checking, watched
from rl_plugins.runtime.programs import Running, run
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.state import save_state
from rl_plugins.testing import make_rollouts, make_run, make_tokens
from rl_plugins.testing.data import make_token_ids
from rl_plugins.testing.engine import TableEngine, make_prompt


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
        "for ever yields nothing",
        "for ever yields a request",
        "for ever yields side by side",
        "draws from random",
    },
    "select_prompts": {"without an end", "returns an object that raises"},
    "plan": {
        "plans group 10**30",
        "plans spare huge",
        "plans given None",
        "raises an exception without a text",
        "plans edit without a role behind one",
        "plans redundant 1",
        "plans max_turns 3",
        "keeps a circle",
    },
    "plan, round 1": {"plans prompt of another dataset"},
    "observe": {
        "returns a generator",
        "changes argument 0.meta[numbers][0]",
        "changes argument 2",
        "keeps a tensor on no device",
        "keeps a list of itself",
    },
    "rewards": {"returns 1e38", "changes argument 0.reward behind torch", "logs complex"},
    "advantages": {"returns 1e38", "returns a nested tensor", "changes argument 0.turns.anchor[0]"},
    "shape": {
        "row_columns 1e300",
        "advantages 1e38",
        "row_columns None",
        "advantages an object that raises",
        "old_logprobs slightly positive",
    },
    "before_update": {"lr_scale 1e300", "columns 1e300", "lr_scale a complex tensor", "changes argument 0.columns"},
    "policy_loss": {"NaN gradient", "NaN gradient at masked tokens", "another graph", "on no device", "complex"},
    "admit": {"fresh huge", "resume that raises"},
    "teacher_prompts": {"one too few", "token ids", "a message without a role", "returns text"},
    "regularize": {"NaN gradient at masked tokens", "complex", "changes argument 0.columns", "of advantages"},
    "start": {"draws into a tensor", "keeps a sparse tensor"},
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


@pytest.mark.parametrize("error", sorted(set(hooks.ERRORS) - {"KeyboardInterrupt"}))
def test_whatever_ends_check_or_the_making_of_a_method_is_named(error: str) -> None:
    """An exit, too: it would end the run without a word, and with status 0."""
    raising = hooks.raising(hooks.ERRORS[error])
    with pytest.raises(ConfigError, match="`bad` failed in `check`"):
        hooks.bad("check", raising).check(make_run())
    with pytest.raises(MethodError, match="`bad` failed in `stages`"):
        stack = hooks.bad("stages", raising)
        stack.call("stages", stack.methods[0])
    raises = from_params(lambda p: raising(None))
    for place, value in {"__init__": raising, "needs": raises, "rows_per_rollout": raises}.items():
        cls = type("Bad", (Method,), {"name": "bad", "observe": lambda *args: None, place: value})
        with pytest.raises(ConfigError, match="`Bad` cannot be built"):
            registry.build(cls, None, "bad")


def test_an_init_hands_its_parameters_on() -> None:
    @dataclass(frozen=True)
    class Params(MethodParams):
        weight: float = param(1.0, "weight")

    def forgets(self: Method, params: Any = None) -> None:
        self.weight = params.weight  # type: ignore[attr-defined]

    def keeps_them_alone(self: Method, params: Any = None) -> None:
        self.params = params

    def begins_without(self: Method, params: Any = None) -> None:
        Method.__init__(self)

    def good(self: Method, params: Any = None) -> None:
        Method.__init__(self, params)

    body = {"name": "bad", "observe": lambda *args: None, "Params": Params, "needs": from_params(lambda p: set())}
    for wrong in (forgets, keeps_them_alone, begins_without):
        with pytest.raises(ConfigError, match=r"`Bad.__init__` must call `super\(\).__init__\(params\)`"):
            registry.build(type("Bad", (Method,), {**body, "__init__": wrong}), {"weight": 2.0}, "bad")
    made = registry.build(type("Good", (Method,), {**body, "__init__": good}), {"weight": 2.0}, "bad")
    assert made.params.weight == 2.0


@pytest.mark.parametrize("what", hooks.UNSAVED)
def test_a_state_that_cannot_be_saved_is_refused_by_name(what: str, tmp_path: Any) -> None:
    """In an ordinary run when the state is taken, before anything is written; everywhere else, too."""
    stack = hooks.bad("observe", lambda self, *args: self.state.update(good=1, x=[0, {"y": hooks.UNSAVED[what]()}]))
    hooks.drive_batch(stack)
    with pytest.raises(StateError, match=r"`methods\.bad\.state\.x\.1\.y") as e:
        stack.state_dict("f")
    assert len(str(e.value)) < 400
    with pytest.raises(StateError, match=r"`a\.0"):
        save_state(tmp_path, {"a": [hooks.UNSAVED[what]()]})
    assert not list(tmp_path.iterdir())


def test_what_was_saved_before_still_is() -> None:
    kept = {
        "a": [1, -(2**70), 0.5, None, True, ("x", torch.ones(2).bool())],
        "b": {"c": torch.ones(2, requires_grad=True)},
    }
    stack = hooks.bad("observe", lambda self, *args: self.state.update(kept))
    hooks.drive_batch(stack)
    state = stack.state_dict("f")["methods"]["bad"]["state"]
    assert state["a"][:5] == kept["a"][:5] and state["a"][5][0] == "x" and state["b"]["c"].tolist() == [1, 1]


class Some(Method):
    """Leaves out prompts."""

    name = "some"

    def rollout(self, prompt: Any) -> Any:
        yield []
        return [prompt.start()] if "keep" in prompt.columns["prompt"][0]["content"] else []


def test_a_program_may_leave_out_prompts_and_not_all_of_a_batch() -> None:
    engine = TableEngine(lambda text: {"a": 1.0})
    prompts = [make_prompt(engine.chat, text, n=2) for text in ("a", "keep", "b")]
    programs = [Running(Some(), p) for p in prompts]
    run(programs, engine)
    assert [len(p.rows or []) for p in programs] == [0, 1, 0]
    for stack, rows, fine in (
        (MethodStack([Some()]), 1, True),
        (MethodStack([Some()]), 0, False),
        (hooks.bad("observe", lambda *args: None), 0, True),  # the host's own affair
    ):
        rollouts = make_rollouts([1.0] * rows)
        decided: Callable[[], Any] = lambda s=stack, r=rollouts: decide(s, r, make_tokens(r), None, grpo_advantages, 8)
        if fine:
            assert len(decided().trained) == rows
        else:
            with pytest.raises(MethodError, match="`some` returned something illegal from `rollout`: no rollout"):
                decided()
    nothing = {"name": "nothing", "rollout": lambda self, prompt: hooks.program(returns=())(self, prompt)}
    with pytest.raises(AssertionError, match="returns no rollout for any prompt"):
        testing.check_method(type("Nothing", (Method,), nothing))


@pytest.mark.parametrize("error", sorted(set(hooks.ERRORS) - {"KeyboardInterrupt", "GeneratorExit"}))
def test_whatever_a_program_does_when_it_is_closed_is_named(error: str) -> None:
    def rollout(self: Method, prompt: Any) -> Any:
        try:
            yield Generate(prompt.start())
        finally:
            raise hooks.ERRORS[error]()

    method = hooks.bad("rollout", rollout).methods[0]
    program = Running(method, make_prompt(hooks.Chat(), "x"))
    with pytest.raises(MethodError, match="`bad` failed in `rollout`"):
        program.close()


def test_legal_programs_stay_far_below_the_limit() -> None:
    """latr asks for every token of every branch."""
    method = Latr(Latr.Params(decode_ahead=1))
    engine = TableEngine(lambda text: {"a": 1.0, "b": 1.0, "c": 1.0})
    program = Running(method, make_prompt(engine.chat, "x", n=8, max_tokens=60))
    run([program], engine)
    assert 200 < program._asked < program._most_requests() / 20


def test_densities_may_be_above_one() -> None:
    """Of a policy without a vocabulary; tokens that left may have anything."""
    rollouts = hooks.batch()
    tokens = make_tokens(rollouts)
    old = torch.where(tokens.row == 2, 0.7, -0.7)

    def shaped(keep: Any) -> Any:
        return lambda self, rollouts, tokens: Shape(old_logprobs=old, keep_rows=keep)

    def run_it(keep: Any, vocabulary: int | None) -> Any:
        stack = MethodStack([type("Bad", (Method,), {"name": "bad", "needs": {"tokens"}, "shape": shaped(keep)})()])
        stack.vocabulary = vocabulary
        return decide(stack, rollouts, tokens, None, grpo_advantages, hooks.ROWS).old_logprobs

    assert run_it(None, None).max() == pytest.approx(0.7)
    assert run_it(torch.arange(hooks.ROWS) != 2, 50) is not None
    with pytest.raises(MethodError, match=r"`bad` returned something illegal from `shape`: `old_logprobs` has 0\.7"):
        run_it(None, 50)


def test_limits_that_a_method_was_given_are_not_its_own() -> None:
    """The method that asks for them says so; the next in the chain hands them on."""

    def asks(self: Method, plan: Any) -> Any:
        return plan.replace(rows=tuple(row.replace(redundant=1, max_turns=4) for row in plan.rows))

    def lowers(self: Method, plan: Any) -> Any:
        return plan.replace(rows=tuple(row.replace(max_tokens=5) for row in plan.rows))

    first = type("First", (Method,), {"name": "first", "plan": asks, "needs": {"redundancy", "turn_limits"}})
    second = type("Second", (Method,), {"name": "second", "plan": lowers})
    stack = MethodStack([first(), second()])
    hooks.drive_plan(stack)
    with pytest.raises(MethodError, match="`first` returned .* `plan`: `redundant` is 1.*`needs`"):
        first.needs = {"turn_limits"}  # type: ignore[attr-defined]
        hooks.drive_plan(MethodStack([first(), second()]))


def test_a_run_looks_at_the_generators_only_when_debugged(monkeypatch: pytest.MonkeyPatch) -> None:
    rollouts = make_rollouts([0.5] * 4)
    stack = hooks.bad("advantages", lambda self, r: r.reward + torch.rand(4))
    monkeypatch.setenv("RL_PLUGINS_DEBUG", "")
    assert len(stack.one("advantages", rollouts)) == 4
    monkeypatch.setenv("RL_PLUGINS_DEBUG", "1")
    with pytest.raises(MethodError, match="`bad` uses the global random generator of torch in `advantages`"):
        stack.one("advantages", rollouts)
    own = hooks.bad("advantages", lambda self, r: torch.rand(4, generator=torch.Generator().manual_seed(1)))
    assert len(own.one("advantages", rollouts)) == 4
