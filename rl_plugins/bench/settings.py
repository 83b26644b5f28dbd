"""Parameters with which a method has something to act on in the tasks of the bench; all others are the paper's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PARAMS: Mapping[str, Mapping[str, Any]] = {}
