"""The simulated schedules of DORA: nothing is lost, and the limits of what they can do."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).parents[1] / "examples" / "evidence"


@pytest.fixture(scope="module")
def schedules() -> Any:
    sys.path.insert(0, str(FOLDER))
    try:
        spec = importlib.util.spec_from_file_location("dora_schedules", FOLDER / "dora_schedules.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
        return module
    finally:
        sys.path.remove(str(FOLDER))


@pytest.mark.parametrize("staleness", [None, 0, 1, 4])
def test_every_answer_is_accounted_for(schedules: Any, staleness: int | None) -> None:
    books = schedules.ahead(0, 32, staleness, batches=6)
    books.check()
    assert books.trained == 6 * schedules.BATCH and books.busy == pytest.approx(books.end * 32), "no slot is idle"
    if staleness is None:
        assert books.discarded == 0 and books.one_version < books.trained
    else:
        assert books.one_version == books.trained and max(books.ages) <= staleness


def test_sync_waits_for_the_longest(schedules: Any) -> None:
    books = schedules.sync(0, 32, batches=4)
    books.check()
    assert max(books.ages) == 0 and books.busy < books.end * 32
