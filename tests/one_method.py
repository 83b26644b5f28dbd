"""Methods for the tests of the driver, made of functions; and errors that must hold certain words."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import pytest

from rl_plugins.core.errors import MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.params import MethodParams, has_effect


def method(name: str = "m", **members: Any) -> Method:
    """An instance of a new class; functions are hooks, everything else class attributes. It reads tokens, unless it
    says what it needs."""
    hooks = {
        k: (lambda f: lambda self, *args: f(*args))(v) if callable(v) and not isinstance(v, type) else v
        for k, v in members.items()
    }
    reads = frozenset({"tokens"} if {"shape", "observe"} & set(members) else ())
    return type(name.title(), (Method,), {"name": name, "needs": reads, **hooks})()


class Exits(list[Any]):
    """An answer of a hook that ends the process when it is looked at."""

    def _exit(self, *args: Any) -> Any:
        raise SystemExit(0)

    __len__ = __iter__ = __getitem__ = _exit


UNREADABLE = "it cannot be read (SystemExit: 0)."
"""What is said of it."""


def refused(call, *parts: str) -> str:
    with pytest.raises(MethodError) as e:
        call()
    for part in parts:
        assert part in str(e.value)
    return str(e.value)


def acting(cls: type[MethodParams], values: Mapping[str, Any]) -> dict[str, Any]:
    """`values` without those that have no effect beside the others and would be refused: drawn ones, say."""
    left = dict(values)
    while True:
        made = object.__new__(cls)  # unchecked
        for f in dataclasses.fields(cls):
            object.__setattr__(made, f.name, left.get(f.name, f.default))
        idle = [name for name in left if name in cls.__dataclass_fields__ and not has_effect(made, name)]
        if not idle:
            return left
        left = {name: value for name, value in left.items() if name not in idle}


def changed(params: Any, **changes: Any) -> Any:
    """`params` with other values; those that then have no effect are left out."""
    values = {f.name: getattr(params, f.name) for f in dataclasses.fields(params)} | changes
    return type(params)(**acting(type(params), values))
