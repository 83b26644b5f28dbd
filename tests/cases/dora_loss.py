"""`dora_loss` in the contract test."""

from __future__ import annotations

from cases import Case, Effects

CASE = Case(effects=Effects(settings=({}, {"neg_high": 1.2}, {"weight_cap": 1.05}), elsewhere=("mu",)))
