"""The reader of golden cases: what it hands to a check, and which checks it does not accept."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import golden_cases
import pytest
from golden_cases import Case, Fields, Golden, floats, plain

from rl_plugins.methods.gdpo import Gdpo
from rl_plugins.methods.latr import Latr

SUMS = [
    {"name": "a", "source": "by hand", "inputs": {"x": [1, 2]}, "params": {"factor": 2}, "expected": {"sum": [6, 3]}},
    {"name": "b", "inputs": {"x": [5]}, "params": {"factor": 3}, "expected": {"sum": [15, 5]}},
]


@pytest.fixture
def sums(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Golden:
    """Cases of a sum, times a factor and alone; without a check."""
    (tmp_path / "sums.json").write_text(json.dumps({"cases": SUMS}))
    monkeypatch.setattr(golden_cases, "FOLDER", tmp_path)
    return Golden("sums")


def case_of(**values: Any) -> Case:
    return Case("made.json", {"name": "made", "inputs": {}, "params": {}, "expected": {}, **values})


def right(case: Case) -> None:
    total = sum(case.inputs["x"])
    assert [total * case.params["factor"], total] == case.expected["sum"]


def test_a_check_that_reads_everything_is_accepted(sums: Golden) -> None:
    sums.kind("x")(right)
    for case in sums.cases:
        sums.check(case)
    sums.check_further_cases()


def by_name(case: Case) -> None:
    assert sum(case.inputs["x"]) * case.params["factor"] == {"a": 6, "b": 15}[str(case)]
    assert case.expected["sum"]


def half(case: Case) -> None:
    assert sum(case.inputs["x"]) * case.params["factor"] == case.expected["sum"][0]


def everything(case: Case) -> None:
    inputs = dict(case.inputs)
    assert sum(inputs["x"]) * case.params["factor"] == case.expected["sum"][0]
    assert sum(inputs["x"]) == case.expected["sum"][1]


@pytest.mark.parametrize(
    ("check", "error", "text"),
    [
        (by_name, KeyError, "one case more"),
        (half, pytest.fail.Exception, r"another value at \('sum', 1\) of `expected` makes no difference"),
        (everything, pytest.fail.Exception, "DID NOT RAISE"),
    ],
)
def test_checks_by_name_of_half_a_case_or_of_unknown_fields_are_refused(
    sums: Golden, check: Any, error: Any, text: str
) -> None:
    sums.kind("x")(check)
    for case in sums.cases:
        sums.check(case)  # none of them is noticed by the cases of the file
    with pytest.raises(error, match=text):
        sums.check_further_cases()


def test_what_is_not_read_is_named(sums: Golden) -> None:
    @sums.kind("x")
    def check(case: Case) -> None:
        assert case.inputs["x"]

    with pytest.raises(pytest.fail.Exception, match=r"`a` of sums\.json: nothing reads params\.factor, expected\.sum"):
        sums.check(sums.cases[0])


def test_kinds_are_told_apart_by_inputs(sums: Golden) -> None:
    sums.kind("x", "y")(right)
    sums.kind("y", "z")(right)
    for inputs, text in (
        ({"y": [1]}, r"several kinds: inputs\.y"),
        ({"w": 1, "v": 2}, r"no known kind: inputs\.w"),
    ):
        with pytest.raises(pytest.fail.Exception, match=text):
            sums.check(case_of(inputs=inputs, expected={"sum": 1}))
    with pytest.raises(AssertionError, match=r"no case of sums\.json is of the kind of \['right'\]"):
        sums.check_further_cases()


def test_fields_inside_of_lists_count_and_looking_is_not_reading() -> None:
    fields = Fields({"steps": [{"a": 1, "b": 2}, {"a": 3}], "more": {"c": 4}}, "case `made`")
    assert "more" in fields and list(fields) == ["steps", "more"]
    assert [step["a"] for step in fields["steps"]] == [1, 3]
    assert list(fields.unread()) == ["steps[0].b", "more"]
    with pytest.raises(KeyError, match=r"case `made` has no field more\.d"):
        fields["more"]["d"]
    assert plain(fields) == {"steps": [{"a": 1, "b": 2}, {"a": 3}], "more": {"c": 4}}
    assert list(fields.unread()) == []


def test_values_that_a_check_does_not_know_are_refused() -> None:
    params = case_of(params={"agg": "mean"}).params
    params.must_be("agg", "sum", "mean")
    params.must_be("other", 1)  # it is not there
    with pytest.raises(pytest.fail.Exception, match=r"`made` of made\.json: params\.agg is 'mean'; .* knows 'sum'"):
        params.must_be("agg", "sum")


def test_parameters_have_the_authors_names_or_those_of_the_method() -> None:
    case = case_of(params={"epsilon": 0.5, "nan_policy": "zero", "seed": 3})
    built = case.build(Gdpo, {"epsilon": "eps_group"}, nan_policy="exclude", batch_stat="token")
    assert (built.eps_group, built.nan_policy, built.batch_stat) == (0.5, "zero", "token")
    assert case.unread() == ["params.seed"]
    case = case_of(params={"candidates": 3, "lookahead_steps": [3, 5]})
    built = case.build(Latr, {"lookahead_steps": "lookahead"})
    assert (built.candidates, built.lookahead) == (3, (3, 5))
    twice = case_of(params={"epsilon": 0.5, "eps_group": 0.1})
    with pytest.raises(pytest.fail.Exception, match=r"params\.eps_group is a second value for `eps_group`"):
        twice.build(Gdpo, {"epsilon": "eps_group"})


def test_null_is_nan_among_floats() -> None:
    (row,) = floats([[1, None]])
    assert row[0] == 1.0 and math.isnan(row[1])


def test_every_golden_file_is_read_by_a_test() -> None:
    read = set()
    for path in Path(__file__).parents[1].rglob("test_*.py"):
        text = path.read_text()
        for variable, slug in re.findall(r'^([A-Z_]+) = Golden\("(\w+)"', text, flags=re.M):
            assert text.count(f"    {variable}.check(case)\n") == 1, path
            assert text.count(f"    {variable}.check_further_cases()\n") == 1, path
            read.add(slug)
    assert read == {path.stem for path in golden_cases.FOLDER.glob("*.json")}
