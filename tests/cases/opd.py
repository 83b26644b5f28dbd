"""`opd` in the contract test."""

from __future__ import annotations

from cases import Case

CASE = Case(params={"teacher": "larger/model"})
