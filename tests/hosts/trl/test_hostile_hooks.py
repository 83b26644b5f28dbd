"""A sample of the misbehaving hooks of tests/faults/hooks.py in the real trainer: the error names method and hook, and
the weights are where they were."""

from __future__ import annotations

import inspect
import sys
from pathlib import Path

import probes
import pytest
import torch
from harness import make, stub_sampling, weights
from messages import raises

from rl_plugins.core.errors import MethodError
from rl_plugins.core.method import Method

sys.path.insert(0, str(Path(__file__).parents[2] / "faults"))

import hooks

pytestmark = pytest.mark.host

SAMPLE = [
    ("start", "raises an exception without a text"),
    ("select_prompts", "without an end"),
    ("plan", "plans prefix negative"),
    ("plan", "plans spare huge"),
    ("rollout", "returns nothing"),
    ("rollout", "for ever yields nothing"),
    ("rewards", "returns 1e38"),
    ("select", "raises SystemExit"),
    ("advantages", "returns NaN in one"),
    ("shape", "row_columns of text"),
    ("observe", "changes argument 0.reward behind torch"),
    ("observe", "keeps a circle"),
    ("before_update", "lr_scale NaN"),
    ("policy_loss", "NaN gradient at masked tokens"),
    ("regularize", "complex"),
]


@pytest.fixture(scope="module")
def cases():
    return {(case.place, case.what): case for case in hooks.cases()}


@pytest.mark.parametrize(("hook", "what"), SAMPLE)
def test_it_is_named_and_moves_nothing(tmp_path, monkeypatch, cases, hook, what):
    monkeypatch.setattr(hooks, "ROWS", 64)
    monkeypatch.setenv("RL_PLUGINS_DEBUG", "1")  # in-place changes are looked for

    def function(*args):
        return cases[hook, what].function(*args)

    function.__signature__ = inspect.signature(getattr(Method, hook))  # the registry looks at it
    monkeypatch.setattr(probes.Noop, hook, function)
    trainer = make(tmp_path, ["noop"], max_steps=1, learning_rate=0.1)
    before = weights(trainer)
    with raises(MethodError) as error, stub_sampling():
        trainer.train()
    assert "`noop`" in str(error.value) and f"`{hook}`" in str(error.value)
    assert len(str(error.value)) < 6000 and torch.equal(weights(trainer), before)
