"""A verifier for tests of `reward_audit`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def right(row: Mapping[str, Any], completion: str) -> float:
    """1.0 for the right answer."""
    return float(completion.lstrip("=") == row["answer"])
