"""What the suites of the hosts passed in: a file per environment, written by `tests/versions/run.py`."""

from __future__ import annotations

import functools
import json
from importlib import resources
from typing import Any


@functools.cache
def records() -> tuple[dict[str, Any], ...]:
    """By the names of the environments: `environment`, `date`, `versions` by package, `tests`, `passed` (how many),
    `failed` (names), `skipped` (name -> reason)."""
    files = sorted(f for f in resources.files(__name__).iterdir() if f.name.endswith(".json"))
    return tuple(json.loads(f.read_text(encoding="utf-8")) for f in files)
