"""Whole runs of TRL that are killed in the midst of saves and anywhere, and resumed to the same end."""

from __future__ import annotations

import pytest
from run_kills import RUNS, attack

pytestmark = pytest.mark.host


@pytest.mark.parametrize(
    "name",
    ["vade, mc_grpo", "swarm_sapo", *(pytest.param(name, marks=pytest.mark.long) for name in ("april", "ps_grpo"))],
)
def test_a_killed_run_ends_as_one_that_nobody_killed(name: str) -> None:
    assert name in RUNS
    found = attack(name, kills=2 if name in ("swarm_sapo", "ps_grpo") else 4, seed=0)
    assert found.kills.total() >= 2 and found.identical == found.runs > 0
