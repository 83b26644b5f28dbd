"""Methods for the tests of the driver, made of functions; and errors that must hold certain words."""

from __future__ import annotations

from typing import Any

import pytest

from rl_plugins.errors import MethodError
from rl_plugins.method import Method


def method(name: str = "m", **members: Any) -> Method:
    """An instance of a new class; functions are hooks, everything else class attributes."""
    hooks = {
        k: (lambda f: lambda self, *args: f(*args))(v) if callable(v) and not isinstance(v, type) else v
        for k, v in members.items()
    }
    return type(name.title(), (Method,), {"name": name, **hooks})()


def refused(call, *parts: str) -> str:
    with pytest.raises(MethodError) as e:
        call()
    for part in parts:
        assert part in str(e.value)
    return str(e.value)
