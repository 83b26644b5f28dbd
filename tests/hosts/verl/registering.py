"""The probes of tests/hosts/trl, and classes of a test file, as methods the registry finds."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "trl"))

import probes

from rl_plugins.runtime import registry


@contextmanager
def registered(*classes: type) -> Iterator[None]:
    before = registry._entry_points
    probes.register()
    found = registry._entry_points
    own = [EntryPoint(c.name, f"{c.__module__}:{c.__name__}", registry.ENTRY_POINT_GROUP) for c in classes]
    registry._entry_points = lambda: [*found(), *own]
    try:
        yield
    finally:
        registry._entry_points = before
