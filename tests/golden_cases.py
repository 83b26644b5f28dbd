"""Numbers of the authors' code, `tests/golden/*.json`: every case is asserted, and every field of it is read.

A case has `name`, `inputs`, `params` and `expected`. A test file says which kinds of cases its file holds. The kind is
read off the inputs, never off a name or a place, so that a further case in the file needs no change of the test:

    GOLDEN = Golden("vade")

    @GOLDEN.kind("num_correct")  # cases with this input
    def check_posterior(case: Case) -> None:
        ...

    @pytest.mark.parametrize("case", GOLDEN.cases, ids=str)
    def test_golden(case: Case) -> None:
        GOLDEN.check(case)

    def test_further_golden_cases() -> None:
        GOLDEN.check_further_cases()

A case fails if it is of no kind, if a check does not read one of its fields, or if a field has a value that the check
does not know. The message names the case and the field.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from one_method import acting

from rl_plugins.core.params import build_params

FOLDER = Path(__file__).parent / "golden"
DESCRIPTIVE = ("name", "function", "note", "notes", "source")  # of a case; nothing has to read them


class Fields(Mapping[str, Any]):
    """A dictionary of a case, and which of its fields were read. Dictionaries inside are of this kind too."""

    def __init__(self, values: Mapping[str, Any], owner: str, path: str = "") -> None:
        self._owner, self._path = owner, path
        self._values = {name: self._wrap(value, f"{path}.{name}".lstrip(".")) for name, value in values.items()}
        self._read: set[str] = set()

    def _wrap(self, value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return Fields(value, self._owner, path)
        if isinstance(value, list):
            return [self._wrap(v, f"{path}[{i}]") for i, v in enumerate(value)]
        return value

    def __getitem__(self, name: str) -> Any:
        if name not in self._values:
            raise KeyError(f"{self._owner} has no field {f'{self._path}.{name}'.lstrip('.')}")
        self._read.add(name)
        return self._values[name]

    def __contains__(self, name: object) -> bool:
        return name in self._values  # to look is not to read

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    def must_be(self, name: str, *allowed: Any) -> None:
        """Reads a field, if there is one, whose value the check takes for granted."""
        if name in self and self[name] not in allowed:
            names = " or ".join(repr(a) for a in allowed)
            pytest.fail(f"{self._owner}: {self._path}.{name} is {self[name]!r}; the check knows {names} only")

    def unread(self) -> Iterator[str]:
        for name, value in self._values.items():
            if name not in self._read:
                yield f"{self._path}.{name}".lstrip(".")
            else:
                yield from _unread(value)


def _unread(value: Any) -> Iterator[str]:
    if isinstance(value, Fields):
        yield from value.unread()
    elif isinstance(value, list):
        for v in value:
            yield from _unread(v)


def plain(value: Any) -> Any:
    """Reads everything in a value and returns it as dictionaries and lists."""
    if isinstance(value, Mapping):
        return {name: plain(v) for name, v in value.items()}
    return [plain(v) for v in value] if isinstance(value, list) else value


def floats(values: Any) -> Any:
    """Numbers in which null stands for NaN."""
    if isinstance(values, list):
        return [floats(v) for v in values]
    return math.nan if values is None else float(values)


class Case:
    """One case: `inputs`, `params`, `expected`; further fields of the case with `case[name]`."""

    def __init__(self, file: str, values: Mapping[str, Any]) -> None:
        self.file, self.values = file, values
        self._all = Fields(
            {"params": {}} | {k: v for k, v in values.items() if k not in DESCRIPTIVE}, f"case `{self}` of {file}"
        )
        self.inputs, self.params, self.expected = (self._all[k] for k in ("inputs", "params", "expected"))

    def __str__(self) -> str:
        return self.values["name"]

    def __getitem__(self, name: str) -> Any:
        return self._all[name]

    def build(self, method: Any, names: Mapping[str, str] | None = None, **own: Any) -> Any:
        """Parameters of `method`: those the test sets itself, and over them those of the case, which the authors give
        whether they have an effect or not."""
        return build_params(method.Params, acting(method.Params, own | self.options(method, names)), method.name)

    def options(self, method: Any, names: Mapping[str, str] | None = None) -> dict[str, Any]:
        """The parameters of `method` that the case has, under the authors' name (`names`: theirs -> ours) or ours."""
        fields, given = {f.name for f in dataclasses.fields(method.Params)}, {}
        for name in self.params:
            ours = (names or {}).get(name, name)
            if ours in fields:
                if ours in given:
                    pytest.fail(f"case `{self}` of {self.file}: params.{name} is a second value for `{ours}`")
                given[ours] = plain(self.params[name])
        return given

    def unread(self) -> list[str]:
        return list(self._all.unread())


@dataclasses.dataclass(frozen=True)
class Kind:
    inputs: tuple[str, ...]
    params: tuple[str, ...]
    expected: tuple[str, ...]
    check: Callable[[Case], None]

    def has(self, case: Case) -> bool:
        places = ((self.inputs, case.inputs), (self.params, case.params), (self.expected, case.expected))
        return any(name in place for names, place in places for name in names)


class Golden:
    """The cases of one file.

    Args:
        slug: the file, without its ending.
        having: only cases with one of these inputs; for a file whose cases belong to several methods, each with a test
            file of its own.

    Attributes:
        cases: all of them, in the order of the file.
    """

    def __init__(self, slug: str, *having: str) -> None:
        self.file = f"{slug}.json"
        cases = [Case(self.file, v) for v in json.loads((FOLDER / self.file).read_text())["cases"]]
        self.cases = [c for c in cases if not having or any(name in c.inputs for name in having)]
        self._kinds: list[Kind] = []

    def kind(
        self, *inputs: str, params: tuple[str, ...] = (), expected: tuple[str, ...] = ()
    ) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
        """The decorated function asserts the cases that have one of these inputs or parameters, or expect one of these
        (settings that were read, without inputs)."""

        def add(check: Callable[[Case], None]) -> Callable[[Case], None]:
            self._kinds.append(Kind(inputs, params, expected, check))
            return check

        return add

    def kind_of(self, case: Case) -> Kind:
        kinds = [kind for kind in self._kinds if kind.has(case)]
        if len(kinds) != 1:
            many = "several kinds" if kinds else "no known kind"
            pytest.fail(f"case `{case}` of {self.file} is of {many}: inputs.{', inputs.'.join(case.inputs)}")
        return kinds[0]

    def check(self, case: Case) -> None:
        """Asserts a case. Fails too if something in the case is not read."""
        case = Case(self.file, case.values)  # what was read of it in an earlier check does not count
        if not case.expected:
            pytest.fail(f"case `{case}` of {self.file} expects nothing")
        self.kind_of(case).check(case)
        if case.unread():
            pytest.fail(f"case `{case}` of {self.file}: nothing reads {', '.join(dict.fromkeys(case.unread()))}")

    def check_further_cases(self) -> None:
        """Further cases of the same format, made from those of the file: one with another name is asserted, one with a
        field or a kind nobody knows is refused by name, and one with any other expected number fails."""
        of_kind: dict[int, Case] = {}
        expects: dict[tuple[int, str], tuple[Case, list[tuple[Any, ...]]]] = {}
        for case in self.cases:
            self.check(_changed(case))
            number = self._kinds.index(self.kind_of(case))
            of_kind.setdefault(number, case)
            for path in _leaves(case.values["expected"]):
                field = ".".join("[]" if isinstance(p, int) else p for p in path)
                expects.setdefault((number, field), (case, []))
                if expects[number, field][0] is case:
                    expects[number, field][1].append(path)
        unused = [kind.check.__name__ for i, kind in enumerate(self._kinds) if i not in of_kind]
        assert not unused, f"no case of {self.file} is of the kind of {unused}"

        for case in of_kind.values():
            for section in ("inputs", "params", "expected"):
                self._refuses(_changed(case, (section, "unheard_of"), 1), f"{section}.unheard_of")
            self._refuses(_changed(case, ("unheard_of",), 1), "unheard_of")
            self._refuses(_changed(case, ("inputs",), {"unheard_of": 1}), "inputs.unheard_of")
            self._refuses(_changed(case, ("expected",), {}), "expects nothing")

        for case, paths in expects.values():
            for path in {paths[0], paths[len(paths) // 2], paths[-1]}:
                changed = _changed(case, ("expected", *path), _other(_at(case.values["expected"], path)))
                try:
                    self.check(changed)
                except (Exception, pytest.fail.Exception):
                    continue
                pytest.fail(f"case `{case}` of {self.file}: another value at {path} of `expected` makes no difference")

    def _refuses(self, case: Case, text: str) -> None:
        with pytest.raises(pytest.fail.Exception, match=re.escape(text)) as caught:
            self.check(case)
        assert f"case `{case}` of {self.file}" in str(caught.value)


def _changed(case: Case, path: tuple[Any, ...] = (), value: Any = None) -> Case:
    """The case under another name, with another value at a path."""
    values = copy.deepcopy(dict(case.values))
    values["name"] = "one case more"
    if path:
        _at(values, path[:-1])[path[-1]] = value
    return Case(case.file, values)


def _at(values: Any, path: tuple[Any, ...]) -> Any:
    for step in path:
        values = values[step]
    return values


def _leaves(values: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of everything that is no dictionary or list with something in it."""
    if isinstance(values, (dict, list)) and values:
        for step, value in values.items() if isinstance(values, dict) else enumerate(values):
            yield from _leaves(value, (*path, step))
    else:
        yield path


def _other(value: Any) -> Any:
    """A value that no tolerance takes for this one."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return 0.5 if math.isnan(value) else value + 1 + abs(value)
    if isinstance(value, str):
        return f"{value}?"
    return {"[]": [7], "{}": {"7": 7}}.get(str(value), 7)
