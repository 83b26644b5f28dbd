"""`epo` in the contract test."""

from __future__ import annotations

from cases import Case, Effects

CASE = Case(
    # a first batch has no corridor but its own
    effects=Effects(settings=({}, {"include_current": True, "kl": 0.9, "kr": 1.1})),
)
