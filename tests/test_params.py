"""Parameters arrive from Python, YAML and the command line and are parsed by their declared type, or refused."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, Optional

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from messages import raises

from rl_plugins.core.errors import ConfigError
from rl_plugins.core.params import (
    FUNCTION,
    GIVEN,
    MethodParams,
    above,
    below,
    build_params,
    declaration_problems,
    describe_params,
    param,
    params_to_dict,
    parse_value,
)

INF = math.inf
Mode = Literal["mad", "none", "std"]


def module_function(x: float) -> float:
    return x


class Judge:
    def __call__(self, text: str) -> float:
        return 0.0

    def score(self, text: str) -> float:
        return 1.0


judge = Judge()
not_callable = 3


@dataclass(frozen=True)
class Params(MethodParams):
    eps: float = param(1e-3, "added to the divisor", gt=0, lt=1)
    rounds: int = param(2, "rounds", ge=1, le=8)
    first: bool = param(False, "the first turn counts")
    tag: str = param("answer", "tag")
    mode: Mode = param("mad", "what to divide by")
    order: Literal[1, 2] = param(1, "norm")
    clip: float | None = param(None, "limit", gt=0)
    bins: tuple[float, ...] = param((0.25, 0.75), "edges", ge=0, le=1)
    names: tuple[str, ...] = param((), "names")
    counts: tuple[int, ...] | None = param(None, "counts", ge=0)
    high: float = param(5.0, "upper clip", ge=0, allow_inf=True)
    penalty: Callable[..., float] | None = param(None, "penalty")
    either: bool | float = param(False, "off, or a limit", gt=0)


# parameter -> what may be given and what becomes of it
ACCEPTED: dict[str, list[tuple[Any, Any]]] = {
    "eps": [(0.5, 0.5), ("1e-3", 1e-3), (" 0.25 ", 0.25), ("1E-3", 1e-3), (".5", 0.5)],
    "high": [(1, 1.0), ("3", 3.0), (INF, INF), ("inf", INF), ("Infinity", INF), (10**20, 1e20), (0, 0.0)],
    "rounds": [(3, 3), ("3", 3), (" 3 ", 3), (3.0, 3), (1, 1), (8, 8)],
    "first": [(True, True), (False, False)]
    + [(t, True) for t in ("true", "True", "TRUE", "yes", "on", "1", " true ")]
    + [(t, False) for t in ("false", "False", "no", "off", "0")],
    "tag": [("x", "x"), ("", ""), ("1", "1"), ("none", "none"), ("a,b", "a,b"), (" kept ", " kept ")],
    "mode": [("mad", "mad"), ("none", "none"), ("std", "std")],
    "order": [(2, 2), ("2", 2), (2.0, 2)],
    "clip": [(None, None), ("none", None), ("None", None), ("null", None), (3, 3.0), ("3", 3.0)],
    "bins": [
        ("0,1", (0.0, 1.0)),
        ("0.5", (0.5,)),
        ([0.1, "0.2"], (0.1, 0.2)),
        ((1,), (1.0,)),
        ([], ()),
        ("", ()),
        ("0.1, 0.9", (0.1, 0.9)),
    ],
    "names": [("a,b", ("a", "b")), ("a, b", ("a", "b")), (["a,b", "c"], ("a,b", "c")), ("one", ("one",)), ((), ())],
    "counts": [(None, None), ("none", None), ("1,2", (1, 2)), ([1, 2.0], (1, 2))],
    "penalty": [
        (None, None),
        ("none", None),
        (module_function, module_function),
        (len, len),
        (judge, judge),
        ("math:sqrt", math.sqrt),
        ("os.path:join", __import__("os").path.join),
        (f"{__name__}:module_function", module_function),
        (f"{__name__}:Judge", Judge),
        (f"{__name__}:judge", judge),
        (f"{__name__}:Judge.score", Judge.score),
    ],
    "either": [(True, True), ("off", False), (0.5, 0.5), ("2.5", 2.5)],
}
REFUSED: dict[str, list[tuple[Any, str]]] = {
    "eps": [
        ("", "number"),
        ("1,5", "number"),
        ("much", r"is 'much' \(str\).*number"),
        (True, r"is True \(bool\).*number"),
        (None, "number"),
        ([0.1], r"is \[0.1\] \(list\).*number"),
        ("nan", "finite"),
        (math.nan, "finite"),
        ("inf", "finite"),
        (-INF, "finite"),
        (0, "is 0.0.*> 0 and < 1"),
        ("1", "is 1.0.*> 0 and < 1"),
        (1 + 1j, "number"),
    ],
    "high": [(math.nan, "a finite number"), ("nan", "a finite number"), (-1, ">= 0"), (-INF, ">= 0")],
    "rounds": [
        ("3.0", "whole number"),
        (2.5, "whole number"),
        ("two", "whole number"),
        (True, "whole number"),
        (None, "whole number"),
        (INF, "whole number"),
        (math.nan, "whole number"),
        ("1e0", "whole number"),
        (0, "is 0.*>= 1 and <= 8"),
        ("9", "is 9.*>= 1 and <= 8"),
    ],
    "first": [
        (1, r"is 1 \(int\).*true or false"),
        (0.0, "true or false"),
        ("2", "true or false"),
        (None, ""),
    ],
    "tag": [
        (1, r"is 1 \(int\).*text"),
        (True, "text"),
        (None, "text"),
        (["a"], "text"),
    ],
    "mode": [
        ("mean", "is 'mean'.*'mad', 'none', 'std'"),
        ("maad", "Did you mean `mad`"),
        (None, "is None.*allowed"),
        (False, "is False.*allowed"),
        (["mad"], "allowed"),
    ],
    "order": [(3, "is 3.*1, 2"), (True, "is True.*1, 2"), ("1.0", "allowed: 1, 2")],
    "clip": [(0, "is 0.0.*> 0"), ("no", "number"), (True, "number")],
    "bins": [
        ("0,2", "is 2.0.*>= 0 and <= 1"),
        ([0.1, "x"], "is 'x'"),
        (0.5, r"is 0.5 \(float\).*list of float"),
        ({"a": 1}, "list of float"),
        (None, "list of float"),
    ],
    "names": [([1], r"is 1 \(int\).*text"), (3, "list of text")],
    "counts": [("1,2.5", "a whole number"), ([-1], "is -1.*>= 0"), (3, "list of int")],
    "penalty": [
        ("math:sqroot", "AttributeError.*sqroot"),
        ("no_such_module_x:f", "ModuleNotFoundError.*no_such_module_x"),
        ("math.sqrt", "module:attribute"),
        ("a:b:c", "module:attribute"),
        (":sqrt", ""),
        ("math:", ""),
        (f"{__name__}:not_callable", "callable"),
        (3, r"is 3 \(int\).*callable"),
        ("params_broken_module:f", "RuntimeError.*no such GPU"),
    ],
    "either": [("maybe", "true/false.*float > 0"), (-1.0, r"is -1.0 \(float\).*> 0")],
}


@pytest.fixture(autouse=True)
def broken_module(tmp_path, monkeypatch):
    (tmp_path / "params_broken_module.py").write_text("raise RuntimeError('no such GPU')")
    monkeypatch.syspath_prepend(str(tmp_path))


def flat(table):
    """Cases with names that are the same in every process (an object's address is not)."""
    named = [(name, case) for name, cases in table.items() for case in cases]
    return [
        pytest.param(name, *case, id=f"{name}-{type(case[0]).__name__}-{i}") for i, (name, case) in enumerate(named)
    ]


@pytest.mark.parametrize(("name", "value", "expected"), flat(ACCEPTED))
def test_accepted(name, value, expected):
    got = getattr(build_params(Params, {name: value}, "m"), name)
    assert got == expected and type(got) is type(expected)
    assert getattr(Params(**{name: value}), name) == expected  # the same in Python


@pytest.mark.parametrize(("name", "value", "message"), flat(REFUSED))
def test_refused(name, value, message):
    pattern = rf"^Method `m`: parameter `{name}` .*{message}.* See `rl-plugins info m`\.$"
    with raises(ConfigError, match=pattern):
        build_params(Params, {name: value}, "m")
    with raises(ConfigError, match=f"`{name}`.*{message}"):
        Params(**{name: value})


def test_every_parameter_is_in_both_tables():
    names = {f.name for f in dataclasses.fields(Params)}
    assert names == set(ACCEPTED) == set(REFUSED)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eps: 1e-3", 1e-3),  # YAML 1.1 reads this as text
        ("eps: 1.0e-3", 1e-3),
        ("high: .inf", INF),
        ("high: 3", 3.0),
        ("rounds: 3", 3),
        ("first: yes", True),
        ("first: off", False),
        ("first: 'true'", True),
        ("mode: none", "none"),
        ("clip: none", None),
        ("clip: null", None),
        ("clip: ~", None),
        ("clip:", None),
        ("bins: [0, 1e-1]", (0.0, 0.1)),
        ("bins: 0.1,0.2", (0.1, 0.2)),
        ("names: [a, b]", ("a", "b")),
        ("penalty: math:sqrt", math.sqrt),
    ],
)
def test_spellings_of_yaml(text, expected):
    values = yaml.safe_load(text)
    assert getattr(build_params(Params, values, "m"), *values) == expected


@settings(max_examples=60, deadline=None)
@given(st.floats(allow_nan=False, allow_infinity=False), st.integers(), st.booleans())
def test_text_of_a_number_is_that_number(x, n, b):
    assert parse_value(repr(x), float, "p") == x
    assert parse_value(str(n), int, "p") == n and parse_value(n, int, "p") == n
    assert parse_value(str(b), bool, "p") is b
    assert parse_value(f"{x!r}, {x!r}", tuple[float, ...], "p") == (x, x)


@pytest.mark.parametrize(("limit", "good", "bad"), [("gt", 2, 1), ("ge", 1, 0), ("lt", 0, 1), ("le", 1, 2)])
@pytest.mark.parametrize("hint", [int, float, float | None, tuple[int, ...]])
def test_limits_are_exact_at_their_edge(limit, good, bad, hint):
    def wrap(x):
        return [x] if hint == tuple[int, ...] else x

    parse_value(wrap(good), hint, "p", {limit: 1})
    sign = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}[limit]
    with raises(ConfigError, match=rf"{sign}.*1"):
        parse_value(wrap(bad), hint, "p", {limit: 1})


@pytest.mark.parametrize("hint", [list[int], dict[str, float], tuple[int, int], tuple[int], Judge, set, object])
def test_a_type_that_cannot_be_parsed_is_refused_instead_of_taken_as_it_is(hint):
    with raises(ConfigError, match=r"`p`"):
        parse_value([1, 2], hint, "p")
    assert parse_value([1, 2], Any, "p") == [1, 2]


def test_old_style_optional_is_understood():
    assert parse_value("none", Optional[int], "p") is None
    assert parse_value("3", Optional[int], "p") == 3


def test_an_unknown_parameter_gets_the_nearest_names_and_the_list():
    for near in ("ep", "EPS", "e-ps"):
        with raises(ConfigError, match=rf"`m`.*`{near}`.*`eps`"):
            build_params(Params, {near: 1}, "m")
    with raises(ConfigError, match=r"`zzzzz`.*`rl-plugins info m`"):
        build_params(Params, {"zzzzz": 1}, "m")
    with raises(ConfigError, match=r"`3`"):
        build_params(Params, {3: 1}, "m")
    with raises(ConfigError, match=r"`eps`"):
        build_params(MethodParams, {"eps": 1}, "m")


def test_nothing_given_is_the_defaults():
    assert build_params(Params, None, "m") == build_params(Params, {}, "m") == Params()
    assert build_params(MethodParams, None, "m") == MethodParams()


def test_conditions_between_parameters():
    @dataclass(frozen=True)
    class Range(MethodParams):
        low: float = param(0.0, "low")
        high: float = param(1.0, "high")

        def check(self) -> None:
            if not self.low < self.high:
                raise ConfigError(f"`low` ({self.low}) must be below `high` ({self.high}).")

    assert build_params(Range, {"low": "0.5"}, "m").low == 0.5  # type: ignore[attr-defined]
    with raises(ConfigError, match=r"`m`.*`low`.*2.0.*`high`.*1.0"):
        build_params(Range, {"low": "2"}, "m")  # after parsing: numbers, not text


def test_an_illegal_default_is_found_too():
    @dataclass(frozen=True)
    class Broken(MethodParams):
        share: float = param(2.0, "share", le=1)

    with raises(ConfigError, match=r"`share`.*2.0.*<= 1"):
        Broken()


def test_parameters_cannot_be_changed_later():
    with pytest.raises(dataclasses.FrozenInstanceError):
        Params().eps = 0.5  # type: ignore[misc]


def test_the_description_names_type_default_range_and_help():
    rows = {r["name"]: r for r in describe_params(Params)}
    assert list(rows) == [f.name for f in dataclasses.fields(Params)]
    assert rows["eps"] == {
        "name": "eps",
        "type": "float",
        "default": "0.001",
        "range": "> 0, < 1",
        "help": "added to the divisor",
        "only_if": "",
        "example": "",
    }
    assert {n: r["type"] for n, r in rows.items()} == {
        "eps": "float",
        "rounds": "int",
        "first": "true/false",
        "tag": "text",
        "mode": "'mad' | 'none' | 'std'",
        "order": "1 | 2",
        "clip": "float or none",
        "bins": "list of float",
        "names": "list of text",
        "counts": "list of int or none",
        "high": "float",
        "penalty": '"module:attribute" or none',
        "either": "true/false or float",
    }
    assert rows["rounds"]["range"] == ">= 1, <= 8" and rows["tag"]["range"] == ""
    assert rows["clip"]["default"] == "None" and rows["mode"]["default"] == "mad"


def test_the_description_of_a_callable_default_names_it():
    @dataclass(frozen=True)
    class WithDefault(MethodParams):
        judge: Callable[[str], float] = param(module_function, "judge")

    assert describe_params(WithDefault)[0]["default"] == f"{__name__}:module_function"
    assert WithDefault().judge is module_function
    assert build_params(WithDefault, {"judge": "math:exp"}, "m").judge is math.exp  # type: ignore[attr-defined]


def test_as_plain_values_they_survive_json_and_build_the_same_again():
    given = Params(penalty=module_function, bins="0.1,0.2", high=INF, counts=[1], names=["a,b"])
    plain = params_to_dict(given)
    assert plain["penalty"] == f"{__name__}:module_function" and plain["bins"] == [0.1, 0.2]
    assert json.loads(json.dumps(plain)) == plain
    assert build_params(Params, json.loads(json.dumps(plain)), "m") == given
    assert params_to_dict(Params(penalty=judge))["penalty"] == f"{__name__}:Judge"


def test_lists_of_lists_survive_json_too():
    @dataclass(frozen=True)
    class Nested(MethodParams):
        table: tuple[tuple[int, ...], ...] = param(((1, 2), (3,)), "table")

    plain = params_to_dict(Nested())
    assert json.loads(json.dumps(plain)) == plain == {"table": [[1, 2], [3]]}
    assert build_params(Nested, plain, "m") == Nested()


# ---- parameters that have an effect only beside others


@dataclass(frozen=True)
class Dependent(MethodParams):
    scale: Mode = param("mad", "divisor")
    eps: float = param(1e-3, "added to it", gt=0, only_if={"scale": ("mad", "std")})
    weight: float = param(0.0, "weight", ge=0)
    power: int = param(2, "of the weight", ge=1, only_if={"weight": above(0)})
    share: float = param(0.5, "below one", le=1)
    pick: int = param(1, "of the share", only_if={"share": below(1)})
    source: Literal["mean", "nearest"] | Callable[..., Any] = param("mean", "where from")
    size: int = param(8, "of what it sees", only_if={"source": ("nearest", FUNCTION)})
    limit: float | None = param(None, "limit")
    text: str = param("", "text")
    soft: bool = param(False, "limit is soft", only_if=({"limit": GIVEN, "scale": "mad"}, {"text": GIVEN}))
    extract: Callable[..., Any] = param("math:sqrt", "read", only_if={"soft": True})


IDLE = [  # parameters -> which of them has no effect
    ({"scale": "none", "eps": 0.1}, "eps"),
    ({"power": 3}, "power"),
    ({"weight": 0, "power": "3"}, "power"),
    ({"share": 1.0, "pick": 2}, "pick"),
    ({"size": 9}, "size"),
    ({"soft": True}, "soft"),
    ({"soft": "yes", "limit": 1.0, "scale": "std"}, "soft"),
    ({"extract": "math:floor"}, "extract"),
]
ACTS: list[dict[str, Any]] = [
    {"eps": 0.1},
    {"scale": "std", "eps": 0.1},
    {"weight": 0.1, "power": 3},
    {"share": 0.9, "pick": 2},
    {"source": "nearest", "size": 9},
    {"source": len, "size": 9},
    {"soft": True, "limit": 0.0},
    {"soft": True, "scale": "std", "text": "x"},
    {"soft": True, "text": "x", "extract": "math:floor"},
    # what is the default asks for nothing that does not happen
    {"scale": "none", "eps": 1e-3},
    {"scale": "none", "eps": "0.001", "power": 2, "size": 8.0, "soft": False, "extract": math.sqrt},
]


@pytest.mark.parametrize(("values", "name"), IDLE)
def test_a_parameter_without_effect_is_refused(values, name):
    for build in (lambda: Dependent(**values), lambda: build_params(Dependent, values, "m")):
        with raises(ConfigError, match=f"`{name}`") as e:
            build()
        assert f"Remove `{name}`, or change `" in str(e.value)


@pytest.mark.parametrize("values", ACTS)
def test_a_parameter_with_effect_is_taken(values):
    made = Dependent(**values)
    assert Dependent(**params_to_dict(made)) == made  # what a checkpoint tells can be given again


def test_the_message_says_what_to_change():
    with raises(ConfigError) as e:
        build_params(Dependent, {"scale": "none", "eps": 0.1, "size": 9}, "m")
    assert str(e.value) == (
        "Method `m`: `eps` has no effect: it is 0.1, and acts only if `scale` is 'mad' or 'std'; `scale` is 'none'. "
        "Remove `eps`, or change `scale`. `size` has no effect: it is 9, and acts only if `source` is 'nearest' or a "
        "function; `source` is 'mean'. Remove `size`, or change `source`. See `rl-plugins info m`."
    )
    with raises(ConfigError) as e:
        Dependent(soft=True)
    assert "acts only if `limit` is given and `scale` is 'mad', or `text` is given; `limit` is none and" in str(e.value)
    with raises(ConfigError) as e:
        Dependent(scale="none", eps=10.0**300, text="x" * 10_000, power=2**1000)
    assert len(str(e.value)) < 800


def test_info_and_docs_say_when_a_parameter_acts():
    rows = {r["name"]: r["only_if"] for r in describe_params(Dependent)}
    assert rows["eps"] == "`scale` is 'mad' or 'std'"
    assert rows["power"] == "`weight` is above 0"
    assert rows["pick"] == "`share` is below 1"
    assert rows["size"] == "`source` is 'nearest' or a function"
    assert rows["soft"] == "`limit` is given and `scale` is 'mad', or `text` is given"
    assert rows["scale"] == ""
    assert declaration_problems(Dependent) == []


def test_a_condition_that_cannot_hold_is_an_error_of_the_class():
    @dataclass(frozen=True)
    class Wrong(MethodParams):
        scale: Mode = param("mad", "divisor")
        eps: float = param(1e-3, "added", only_if={"scalee": "mad"})
        own: float = param(1e-3, "added", only_if={"own": above(0)})
        typo: float = param(1e-3, "added", only_if={"scale": ("maad", "std")})
        empty: float = param(1e-3, "added", only_if=({},))

    problems = declaration_problems(Wrong)
    assert problems[0] == "`only_if` of `eps` names `scalee`, which is no parameter. Did you mean `scale`?"
    assert problems[1] == "`only_if` of `own` names itself."
    assert problems[2].startswith("`only_if` of `typo` can never hold: parameter `scale` is 'maad'; allowed: 'mad'")
    assert problems[3] == "`only_if` of `empty` is {}; it must map parameters to values."
