"""What authors of methods test with: stored rollouts without any host, and `check_method`, the contract test.

from rl_plugins.testing import check_method
check_method(MyMethod)
"""

from __future__ import annotations

from rl_plugins.testing.contract import check_method
from rl_plugins.testing.data import (
    make_plan,
    make_rollouts,
    make_rows,
    make_run,
    make_terms,
    make_tokens,
    make_turns,
    one_row_per_turn,
    one_step,
    start_stack,
)

__all__ = [
    "check_method",
    "make_plan",
    "make_rollouts",
    "make_rows",
    "make_run",
    "make_turns",
    "make_terms",
    "make_tokens",
    "one_row_per_turn",
    "one_step",
    "start_stack",
]
