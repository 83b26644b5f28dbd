"""`ppo_million` in the contract test."""

from __future__ import annotations

from cases import Case, Effects

CASE = Case(effects=Effects(elsewhere=("window", "test", "alpha", "kl_share", "factor", "max_cuts")))
