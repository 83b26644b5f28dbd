"""`opsd` in the contract test."""

from __future__ import annotations

from cases import Case, Effects

CASE = Case(effects=Effects(values={"template": ["It is {answer}."]}))
