"""The own tests of the patches passed on these very patches and hosts."""

from __future__ import annotations

import importlib.util
import json

import pytest

if importlib.util.find_spec("trl") is None or importlib.util.find_spec("verl") is None:
    pytest.skip("the patches are checked against installed hosts", allow_module_level=True)

import checked


def test_nothing_has_changed_since_they_were_run() -> None:
    assert checked.now() == json.loads(checked.FILE.read_text()), "run `make test-patches`, which notes what passed"
