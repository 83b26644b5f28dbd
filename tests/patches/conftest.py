"""Tests that depend on patches and hosts alone are not part of `make test`; `test_checked.py` says when to run them."""

from __future__ import annotations

import pytest

SLOW = {"stock", "patched"}  # fixtures that run the patches' own tests


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if SLOW & set(getattr(item, "fixturenames", ())) or "keep_ratio_counts" in item.name:
            item.add_marker(pytest.mark.patches)
