"""Rubrics as rewards (arXiv 2507.17746): the reward against a plain loop, what is asked, and what fails."""

from __future__ import annotations

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import raises

from rl_plugins.core.errors import ConfigError
from rl_plugins.kit.services import ChatEndpoint
from rl_plugins.lab.demo.judges import meets
from rl_plugins.methods.rubric import Rubric, weighted
from rl_plugins.runtime.metrics import combine
from rl_plugins.runtime.stack import build_stack
from rl_plugins.testing import make_rollouts, one_step, start_stack

NAN = math.nan
RUBRIC = ("3: states the dose", "1: is polite", "-2: invents a source")


def rubric(judge: Any = None, **params: Any) -> Any:
    params = {"criteria": RUBRIC, "judge_retries": 0, **params}
    return start_stack(Rubric(Rubric.Params(judge=judge, **params)))


def batch(rewards: Any, texts: Any, **changes: Any) -> Any:
    meta = {"prompt": [f"task {i // 2}" for i in range(len(texts))], **changes.pop("meta", {})}
    return make_rollouts(rewards, group_size=2, text=list(texts), meta=meta, **changes)


score = st.sampled_from([0.0, 0.25, 1.0, NAN])  # NaN: the judge fails


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(st.tuples(score, score, score, st.sampled_from([0.0, 1.0, NAN])), min_size=1, max_size=6))
def test_equals_the_loop(rows):
    def judge(prompt: str, criterion: str, completion: str) -> float:
        place = [d.partition(": ")[2] for d in RUBRIC].index(criterion)
        number = int(completion)
        assert prompt == f"task {number // 2}"
        given_ = rows[number][place]
        if given_ != given_:
            raise ConnectionError("no answer here")
        return given_

    expected = []
    for *c, reward in rows:
        expected.append(NAN if reward != reward else (3 * c[0] + c[1] - 2 * c[2]) / 4)
    stack = rubric(judge, judge_concurrency=1)
    rollouts = batch([r for *_, r in rows], [str(i) for i in range(len(rows))])
    with patch("rl_plugins.kit.services.PROBES", 10**6):  # else none is asked where the first ones fail
        got = stack.methods[0].rewards(rollouts).tolist()
    assert got == pytest.approx(expected, nan_ok=True)


def test_equal_questions_are_asked_once_and_answers_are_kept():
    asked: list[tuple[str, ...]] = []

    def judge(*texts: str) -> float:
        asked.append(texts)
        return 1.0

    stack = rubric(judge)
    rollouts = batch([0.0] * 4, ["a", "a", "a", "b"])
    one_step(stack, rollouts)
    one_step(stack, rollouts)
    assert len(asked) == len(set(asked)) == 9  # two texts of the second prompt, one of the first, three criteria
    logged = combine([stack.metrics.take()])
    assert logged["rubric/questions"] == 24 and logged["rubric/judge_failed"] == 0


def test_a_rollout_of_several_rows_is_judged_by_all_of_its_texts():
    seen: list[str] = []
    stack = rubric(lambda prompt, criterion, completion: seen.append(completion) or 1.0, criteria=("2: good",))
    rollouts = batch(
        [0.0] * 3, ["one", "two", "else"], group=[0] * 3, rollout=torch.tensor([0, 0, 1]), index=torch.tensor([0, 1, 0])
    )
    assert stack.methods[0].rewards(rollouts).tolist() == [1.0] * 3
    assert sorted(seen) == ["else", "one\n\ntwo"]


def test_a_rubric_per_prompt_comes_from_the_dataset():
    column = [["1: short"], ["1: short"], ["1: short", "3: right"], ["1: short", "3: right"]]
    stack = rubric(
        lambda prompt, criterion, completion: float(criterion == "right"), criteria=(), criteria_column="rubric"
    )
    rollouts = batch([0.0] * 4, list("abcd"), meta={"rubric": column})
    assert stack.methods[0].rewards(rollouts).tolist() == [0, 0, 0.75, 0.75]
    assert stack.methods[0].needs == {"text", "column:prompt", "column:rubric"}
    with raises(ConfigError, match="short"):
        stack.methods[0].rewards(rollouts.replace(meta={**rollouts.meta, "rubric": [["short"]] * 4}))


def test_an_endpoint_is_asked_for_json():
    said: list[str] = []

    def reply(self: Any, content: str, **options: Any) -> str:
        said.append(content)
        assert "score" in options["response_format"]["json_schema"]["schema"]["properties"]
        return '{"reasons": "it does", "score": 0.5}'

    stack = rubric(None, criteria=("1: short",), judge_url="http://127.0.0.1:9/v1", judge_model="m")
    with patch.object(ChatEndpoint, "__call__", reply):
        assert stack.methods[0].rewards(batch([0.0, NAN], ["a", "b"])).tolist() == pytest.approx(
            [0.5, NAN], nan_ok=True
        )
    (content,) = said
    assert "[Prompt] task 0\n[Response] a\n[Criterion] short" in content


def test_weights_are_read_from_the_texts():
    assert weighted(("2: a: b", " -0.5 :c")) == [(2.0, "a: b"), (-0.5, "c")]


@pytest.mark.parametrize("criteria", [("no weight",), ("-1: bad",), ("x: a", "1: b")])
def test_a_rubric_without_weights_is_refused(criteria):
    with raises(ConfigError, match="need a weight each"):
        build_stack(["rubric"], {"rubric": {"judge": meets, "criteria": criteria}})


@pytest.mark.parametrize("params", [{}, {"criteria": ("1: a",), "criteria_column": "rubric"}])
def test_one_source_of_criteria_is_needed(params):
    with raises(ConfigError, match="`criteria_column`"):
        build_stack(["rubric"], {"rubric": {"judge": meets, **params}})
