"""Texts of users: a config is read as PyYAML and JSON read it; everything else is a ConfigError, and a short one."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from rl_plugins.core.errors import ConfigError, did_you_mean, shortened, shown
from rl_plugins.runtime.config_text import LARGEST, read_json_or_yaml, read_yaml

REFUSED = {
    "an integer as key": ("1: {b: 2}", r"the key 1 \(int\) is no text; put it in quotes"),
    "true as key": ("on: 3", r"the key True \(bool\) is no text"),
    "a list as key": ("[1, 2]: 3", "found unhashable key"),
    "a key twice": ("a: 1\nb: 2\na: 3", r"the key 'a' stands twice in one mapping \(lines 1 and 3\)"),
    "a key twice, inside": ("x:\n- {a: 1, 'a': 2}", "the key 'a' stands twice"),
    "a key twice, spelled otherwise": ("x: {1: 1, 0x1: 2}", "the key 1 stands twice"),
    "control characters": ("a: \x00", "special characters are not allowed"),
    "a surrogate": ("a: \ud800", "invalid continuation byte"),
    "two documents": ("a: 1\n---\nb: 2", "expected a single document"),
    "a Python object": ("a: !!python/object/apply:os.system ['true']", "could not determine a constructor"),
    "no such date": ("a: 2024-13-45", "month must be in 1..12"),
    "no boolean": ("a: !!bool maybe", "KeyError"),
    "no timestamp": ("a: !!timestamp maybe", "AttributeError"),
    "not closed": ("a: [1", "expected ',' or ']'"),
    "an alias of a long name": ("a: *" + "x" * 100_000, "found undefined alias"),
    "too large": ("a" * (LARGEST + 1), f"larger than {LARGEST} bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_config_is_refused_in_few_words(name: str, tmp_path: Path) -> None:
    text, why = REFUSED[name]
    (tmp_path / "run.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    for source in (text, tmp_path / "run.yaml"):
        start = time.process_time()
        with pytest.raises(ConfigError, match=rf"^The run is not readable as YAML: .*({why}).*\.$") as e:
            read_yaml(source, "The run")
        assert len(str(e.value)) < 500 and time.process_time() - start < 5


def test_files_that_hold_no_yaml(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(range(256)) * 10)
    with pytest.raises(ConfigError, match="is not readable as YAML: "):
        read_yaml(tmp_path / "model.bin")
    for path in (tmp_path, tmp_path / "nowhere.yaml", tmp_path / ("x" * 300), Path("a\0b")):
        with pytest.raises(ConfigError, match=r"^The config cannot be read: .*Give the path of a YAML file\.$") as e:
            read_yaml(path)
        assert len(str(e.value)) < 400
    with pytest.raises(ConfigError, match="larger than"):
        read_yaml(Path("/dev/zero"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "3",
        "a: 1e-3\nb: [1, 2.5, ~, yes, '1', 2024-01-02]",
        "base: &base {x: 1, y: 2}\nmine: {<<: *base, y: 3}\nagain: *base",  # merged keys may be set again
        "base: &base {x: 1}\nnext: &next {<<: *base, x: 2}\nlast: {<<: *next}",
        "max_memory: {0: 10GiB, cpu: 20GiB}",  # keys further inside may be numbers
        "a: " + "[" * 40 + "]" * 40,
        '{"a": "é \\u00e9"}',
    ],
)
def test_everything_else_is_read_as_pyyaml_does(text: str, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(text, encoding="utf-8")
    assert read_yaml(text) == read_yaml(tmp_path / "run.yaml") == yaml.safe_load(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('{"a": 1, "a": 2}', "as JSON: the key 'a' stands twice"),
        ('{"b": {"a": 1, "a": 2}}', "as JSON: the key 'a' stands twice"),
        ("{a: [1", "as YAML: "),
        ("{1: 2}", "the key 1 "),
    ],
)
def test_json_or_yaml_of_a_command_line(text: str, why: str) -> None:
    with pytest.raises(ConfigError) as e:
        read_json_or_yaml(text, "`method_params`")
    assert why in str(e.value) and str(e.value).startswith("`method_params` is ") and len(str(e.value)) < 500


def test_json_goes_before_yaml() -> None:
    assert read_json_or_yaml('{"a": 1e-07}', "x") == {"a": 1e-07}
    assert read_json_or_yaml("{a: 1e-07}", "x") == {"a": "1e-07"}


# ---- values in messages


class Unwilling:
    def __repr__(self) -> str:
        raise ValueError("no")

    __str__ = __repr__


@pytest.mark.parametrize(
    "value",
    [None, "", "a'b", b"x", 3, -1.5, True, [], (), {}, set(), frozenset(), [1, "a"], (1,), (1, 2), {1}, frozenset({1}),
     {"a": [1, {"b": (2, 3)}], 2: None}],
)  # fmt: skip
def test_small_values_are_shown_as_they_are(value: Any) -> None:
    assert shown(value) == repr(value)


def test_no_value_is_shown_at_length() -> None:
    bomb: Any = "x"
    for _ in range(40):
        bomb = [bomb] * 10
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    circle: Any = {}
    circle["itself"] = circle
    start = time.process_time()
    for value in ("x" * 10**6, b"x" * 10**6, 10**10_000, [10**10_000], [0] * 10**6, bomb, deep, circle, Unwilling()):
        assert 0 < len(shown(value)) <= 210
    assert time.process_time() - start < 1
    assert shown("ab" * 200) == f"'{'ab' * 99}a [cut]" and shown("abc", 3) == "'ab [cut]"
    assert shown(10**10_000) == "a whole number of about 9966 digits"
    assert shown([Unwilling()]) == "[<Unwilling whose repr raises ValueError>]"
    assert shortened("a" * 300, 5) == "aaaaa [cut]" and shortened(ValueError("no")) == "no"
    assert shortened(Unwilling()) == "<Unwilling whose text cannot be made>"
    assert did_you_mean("vade" * 10**6, ["vade"]) == ""
