"""`dora_reuse` in the contract test."""

from __future__ import annotations

from cases import Case, Effects

CASE = Case(effects=Effects(settings=({"spare_share": 1.0},), elsewhere=("max_staleness", "buffer_groups")))
