"""Runs in which rewards teach nothing, or a method does nothing, say so: once, after several batches, not earlier."""

from __future__ import annotations

import inspect
import re
import sys

import pytest
import torch
from one_method import method

from rl_plugins.core.estimators import grpo_advantages
from rl_plugins.core.method import HOOKS, Idle, Method
from rl_plugins.core.rollouts import PlanRow, Shape
from rl_plugins.runtime import registry
from rl_plugins.runtime.decide import decide
from rl_plugins.runtime.idle import BATCHES, look_for_idle
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.testing import make_rollouts, make_tokens

EQUAL, MIXED = [1.0, 1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0]


@pytest.fixture
def warned(caplog: pytest.LogCaptureFixture):
    caplog.set_level("WARNING", "rl_plugins")
    return lambda: [r.getMessage() for r in caplog.records if r.name == "rl_plugins"]


def batch(stack: MethodStack, rewards: list[float], **logged: float) -> None:
    rollouts = make_rollouts(rewards, [0, 0, 1, 1])
    decision = decide(stack, rollouts, make_tokens(rollouts), None, grpo_advantages, len(rewards))
    look_for_idle(stack, decision, {k.replace("__", "/"): v for k, v in logged.items()})


def test_equal_rewards_warn_once_after_five_batches(warned):
    stack = MethodStack([method(shape=lambda r, t: None)])
    for _ in range(BATCHES - 1):
        batch(stack, EQUAL)
    assert not warned()
    batch(stack, EQUAL)
    (text,) = warned()
    assert "no token had an advantage other than 0" in text and "frac_reward_zero_std" in text
    for _ in range(2 * BATCHES):
        batch(stack, EQUAL)
    batch(stack, MIXED)
    for _ in range(BATCHES):
        batch(stack, EQUAL)
    assert len(warned()) == 1


def test_a_batch_that_taught_something_counts_anew(warned):
    stack = MethodStack([method(shape=lambda r, t: None)])
    for _ in range(3):
        for _ in range(BATCHES - 1):
            batch(stack, EQUAL)
        batch(stack, MIXED)
    assert not warned()


def test_advantages_of_equal_rewards_are_no_reason(warned):
    stack = MethodStack([method(advantages=lambda r: r.reward - 0.5)])  # a baseline of its own
    for _ in range(BATCHES):
        batch(stack, EQUAL)
    assert not warned()


def test_the_methods_are_named_where_rewards_differ(warned):
    stack = MethodStack([method("zero", shape=lambda r, t: Shape(advantages=torch.zeros(len(t)).double()))])
    for _ in range(BATCHES):
        batch(stack, MIXED)
    (text,) = warned()
    assert "`zero`" in text and "Rewards differ" in text


def test_a_run_that_makes_no_step_is_not_told_about_advantages(warned):
    stack = MethodStack([method(aggregation="none", shape=lambda r, t: None)])
    for _ in range(BATCHES):
        batch(stack, EQUAL)
    assert not warned()


def test_all_signs_of_a_method_in_a_row(warned):
    stack = MethodStack([method("tree", idle=(Idle({"branches": 0, "cut": 0}, "raise `width`."),))])
    for _ in range(BATCHES - 1):
        batch(stack, MIXED, tree__branches=0, tree__cut=0)
    batch(stack, MIXED, tree__branches=0)  # tells nothing: not counted, and nothing begins anew
    batch(stack, MIXED, other__branches=1)
    assert not warned()
    batch(stack, MIXED, tree__branches=0, tree__cut=0)
    (text,) = warned()
    assert text == (
        f"tree: it did nothing in the last {BATCHES} batches (tree/branches is 0 and tree/cut is 0): raise `width`."
    )


def test_a_method_that_acts_now_and_then_does_not_warn(warned):
    stack = MethodStack([method("tree", idle=(Idle({"branches": 0, "cut": 0}, "raise `width`."),))])
    for i in range(5 * BATCHES):
        batch(stack, MIXED, tree__branches=0, tree__cut=0.1 if i % BATCHES == 0 else 0)
    assert not warned()


WITH_SIGNS = [n for n in registry.all_names() if isinstance(c := registry.load(n), type) and c.idle]


@pytest.mark.parametrize("name", WITH_SIGNS)
def test_signs_are_logged_where_the_host_sees_them_and_advice_names_parameters(name):
    cls = registry.load(name)
    text = inspect.getsource(sys.modules[cls.__module__])
    for idle in cls.idle:
        for sign in idle.signs:
            assert f'log("{sign}"' in text or f'("{sign}", ' in text or sign == "compared_0", sign
        named = re.findall(r"`([a-z_]+)", idle.advice)
        fields = set(cls.Params.__dataclass_fields__)
        assert not named or fields & set(named) or name in ("m_grpo", "hgpo", "branch_advantages"), (name, named)
    assert {HOOKS[h].place for h in cls.claims()} & {"driver", "generation"}


def test_a_sampler_with_nothing_to_choose(warned):
    class All(Method):
        name = "all"

        def select_prompts(self, pool, n):
            return list(range(pool.size))[:n]

    stack = MethodStack([All()])
    assert [r.prompt_index for r in first_plan(stack, [1, 0], 2, 4, 3).rows] == [0, 1] and not warned()
    assert first_plan(stack, [1, 0], 2, 4, 2).rows == (PlanRow(0, 0, 2), PlanRow(1, 1, 2))
    first_plan(stack, [1, 0], 2, 4, 2)
    (text,) = warned()
    assert "takes all 2 prompts" in text and "`all` has nothing to choose" in text
