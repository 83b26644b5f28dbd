"""`adhint_gradients` in the contract test."""

from __future__ import annotations

from cases import Case, Effects
from cases.worlds import hinted

CASE = Case(
    prepare=hinted,
    # tests/methods/test_adhint.py: they act on forced tokens, which another method makes
    effects=Effects(elsewhere=("kappa", "mask_failures")),
)
