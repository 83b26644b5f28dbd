from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from rl_plugins.core.errors import ConfigError
from rl_plugins.trl import compat

CLOSED = compat.closed_parts()  # of an older TRL
collect_ignore = ["test_asynchronous.py", "test_trl_trace_more.py"] if compat.ASYNCHRONOUS in CLOSED else []


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Iterator[None]:
    """A test of what this TRL does not serve is skipped where it is refused with the reason."""
    try:
        return (yield)
    except ConfigError as e:
        part = next((part for part, why in CLOSED.items() if why in str(e)), None)
        if part is None:
            raise
        pytest.skip(f"{part}: refused with TRL {compat.trl_version()}")


@pytest.fixture(autouse=True, scope="module")
def _probes():
    """The registry finds the probes of this folder, and only in these tests."""
    import probes

    from rl_plugins.runtime import registry

    entry_points = registry._entry_points
    probes.register()
    yield
    registry._entry_points = entry_points
