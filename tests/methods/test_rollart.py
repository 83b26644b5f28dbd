"""RollArt (arXiv 2512.22560): spare rollouts as a method, the bundle, and where they are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rl_plugins.core.errors import ConfigError, MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.redundancy import FIELDS, NOTE, independent
from rl_plugins.core.requests import Generate
from rl_plugins.core.rollouts import PlanRow
from rl_plugins.lab.demo.environments import Grid
from rl_plugins.methods.areal_admission import STRATEGY, THRESHOLD, WARMUP
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.preflight import HostCapabilities, no_redundancy, preflight
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing import make_plan, make_rollouts, start_stack
from rl_plugins.testing.engine import TableEngine, make_prompt, run_program
from rl_plugins.tools.disaggregated.queue import GroupQueue

NAN = math.nan


def stack_of(**params: Any) -> MethodStack:
    return start_stack(*build_stack("rollart_redundancy", {"rollart_redundancy": params}).methods)


@pytest.mark.parametrize("spare", [0, 1, 3])
def test_the_plan_asks_for_redundant_rollouts_and_for_nothing_else(spare: int) -> None:
    stack = stack_of(spare=spare)
    plan = first_plan(stack, range(3), 4, 12, 100)
    assert plan.rows == tuple(PlanRow(i, i, 4, redundant=spare) for i in range(3))
    assert (plan.trained, plan.generated) == (12, 12), "those that are closed are no rows"
    given_ = make_plan(1).replace(rows=(PlanRow(1, 0, 2, spare=3, redundant=2), PlanRow(2, 1, 0)))
    after = stack.call("plan", stack.methods[0], given_) or given_
    assert [row.redundant for row in after.rows] == [2 + spare, 0]
    assert [row.replace(redundant=0) for row in after.rows] == [row.replace(redundant=0) for row in given_.rows]


def test_it_needs_nothing_where_it_does_nothing() -> None:
    assert stack_of(spare=0).needs == set() and stack_of().needs == {"redundancy", f"column:{NOTE}"}


@pytest.mark.parametrize("bad", [-1, 1.5, None])
def test_illegal_numbers_of_a_plan_are_refused(bad: Any) -> None:
    class Asks(Method):
        name = "asks"

        def plan(self, plan: Any) -> Any:
            return plan.replace(rows=tuple(row.replace(redundant=bad) for row in plan.rows))

    with pytest.raises(MethodError, match="`asks` returned something illegal from `plan`: .*redundant"):
        first_plan(start_stack(Asks()), range(3), 4, 12, 100)


def test_more_than_can_be_begun_is_refused() -> None:
    class Asks(Method):
        name = "asks"

        def plan(self, plan: Any) -> Any:
            return plan.replace(rows=tuple(row.replace(redundant=10_000) for row in plan.rows))

    with pytest.raises(MethodError, match="30012 rollouts in 3 rows"):
        first_plan(start_stack(Asks()), range(3), 4, 12, 100)


NOTES = st.lists(
    st.one_of(
        st.none(),
        st.tuples(*[st.floats(0, 9)] * 2, *[st.one_of(st.just(NAN), st.floats(0, 50))] * 4),
    ),
    min_size=1,
    max_size=6,
)


@given(NOTES, st.data())
@settings(deadline=None)
def test_logs_equal_a_loop_over_the_groups(notes: list[Any], data: Any) -> None:
    """Rows of a group carry the same note; some groups, whose completions a plan gave, have none."""
    group = data.draw(st.lists(st.integers(0, len(notes) - 1), min_size=1, max_size=20))
    told = [None if notes[g] is None else dict(zip(FIELDS, notes[g], strict=True)) for g in group]
    stack = stack_of()
    stack.call(
        "observe", stack.methods[0], make_rollouts([0.0] * len(group), group).replace(meta={NOTE: told}), None, {}
    )
    found = combine([stack.metrics.take()])
    for i, name in enumerate(FIELDS):
        known = [notes[g][i] for g in set(group) if notes[g] is not None and not math.isnan(notes[g][i])]
        if known:
            assert found[f"rollart_redundancy/{name}"] == pytest.approx(sum(known) / len(known))
        else:
            assert f"rollart_redundancy/{name}" not in found


@given(st.lists(st.integers(0, 6), min_size=2, max_size=7), st.integers(1, 5))
@settings(deadline=None, max_examples=40)
def test_it_keeps_the_finishers_that_the_papers_queue_keeps(turns: list[int], size: int) -> None:
    """The first G to `put`. Rollouts of as many turns end in the order of their numbers."""
    size = min(size, len(turns) - 1)

    class Plays(Method):
        name = "plays"

        def rollout(self, prompt: Any) -> Any:
            return (yield from independent(prompt, lambda k: self.one(prompt, k)))

        def one(self, prompt: Any, k: int) -> Any:
            for _ in range(turns[k]):
                yield Generate(prompt.start(), max_tokens=1)
            return prompt.start().noted(k=k)

    queue = GroupQueue(size, len(turns) - size)
    queue.advance(0)
    for _ in turns:
        assert queue.ask() == 0
    for k in sorted(range(len(turns)), key=lambda k: (turns[k], k)):
        queue.put(0, k)
    finished = queue.get()
    assert finished is not None
    engine = TableEngine({"": {"a": 1.0}})
    rows = run_program(Plays(), make_prompt(engine.chat, "hi", n=size, redundant=len(turns) - size), engine)
    assert [row.meta["k"] for (row,) in rows] == sorted(finished.rollouts)


# ---- the bundle


def test_the_bound_of_the_bundle_is_verls_and_a_parameter() -> None:
    for given_, threshold in (({}, 2), ({"areal_admission": {"max_staleness": 3}}, 4)):
        stack = build_stack(["turn_control", "rollart"], {"turn_control": {"environment": Grid}, **given_})
        assert stack.names == ["turn_control", "areal_admission", "rollart_redundancy"]
        options = stack.methods[1].host_options["verl"]
        assert options == {**dict.fromkeys(WARMUP, threshold - 1), THRESHOLD: threshold, STRATEGY: "drop"}
        assert stack.methods[2].params.spare == 1


# ---- where nothing would close a rollout


def capabilities(**missing: str) -> HostCapabilities:
    hooks = {"plan", "observe", "rollout", "shape"}
    return HostCapabilities("verl", "0", hooks, {}, ("rollout", "plan"), missing, ["prompt"], {})


def test_without_a_program_that_closes_them_it_is_refused() -> None:
    alone = build_stack("rollart_redundancy")
    assert no_redundancy(alone, "all wait.") == "without a rollout program all wait."
    tree = build_stack(["latr", "rollart_redundancy"])
    why = no_redundancy(tree, "")
    assert why.startswith("`latr` makes the rollouts and does not say that each is alone") and "independent" in why
    agent = build_stack(["turn_control", "rollart_redundancy"], {"turn_control": {"environment": Grid}})
    with pytest.raises(ConfigError, match="`rollart_redundancy` needs rollouts that begin beyond .*: all wait"):
        preflight(alone, capabilities(redundancy="all wait."))
    preflight(agent, capabilities())  # a column that nobody needs to have: the runtime notes it


def test_the_metrics_of_a_run_tell_its_bias() -> None:
    """Short rollouts are kept: those with fewer turns, by the numbers that are logged."""

    class Plays(Method):
        name = "plays"
        brings = {"redundancy"}

        def rollout(self, prompt: Any) -> Any:
            return (yield from independent(prompt, lambda k: self.one(prompt, 1 + 2 * k)))

        def one(self, prompt: Any, turns: int) -> Any:
            t = prompt.start()
            for _ in range(turns):
                (made,) = yield Generate(t, max_tokens=1)
                t = t.add(made)
            return t

    engine = TableEngine({"": {"a": 1.0}, "a": {"a": 1.0}})
    rows = run_program(Plays(), make_prompt(engine.chat, "hi", n=2, redundant=2), engine)
    stack = stack_of()
    rollouts = make_rollouts([0.0, 1.0], [0, 0], lengths=[len(row) for (row,) in rows])
    meta = {NOTE: [row.meta[NOTE] for (row,) in rows]}
    stack.call("observe", stack.methods[0], rollouts.replace(meta=meta), None, {})
    found = {k.partition("/")[2]: v for k, v in combine([stack.metrics.take()]).items()}
    assert found["kept_turns"] == found["kept_tokens"] == 2.0 == torch.tensor([1.0, 3.0]).mean()
    assert found["closed_turns"] == 3.0 and found["closed"] == 2.0 and found["failed"] == 0.0
