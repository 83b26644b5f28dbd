from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True, scope="module")
def _probes():
    """The registry finds the probes of this folder, and only in these tests."""
    import flow_probes

    from rl_plugins.runtime import registry

    entry_points = registry._entry_points
    flow_probes.register()
    yield
    registry._entry_points = entry_points
