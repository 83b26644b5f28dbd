"""`dars` in the contract test."""

from __future__ import annotations

from cases import Case

CASE = Case(params={"n_first": 2, "n_max": 6})
