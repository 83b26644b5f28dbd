"""What a dry run says of the batches in which a schedule goes on: they are planned, with the state of a fresh start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from rl_plugins.core.errors import MethodError
from rl_plugins.core.rollouts import Plan
from rl_plugins.lab.demo.environments import Grid
from rl_plugins.runtime.plan import first_plan
from rl_plugins.runtime.report import plan_lines, stage_lines
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing.data import make_run


def planner(stack: MethodStack, rows: int) -> Callable[[], Plan]:
    stack.start(make_run(dataset_size=16))
    return lambda: first_plan(stack, range(rows // 4), 4, rows, 16)


def told(*names: str, rows: int = 32, **params: Any) -> list[tuple[str, str]]:
    stack = build_stack(names, params)
    return list(stage_lines(stack, planner(stack, rows), rows))


def test_methods_without_a_schedule_have_one_kind_of_batch() -> None:
    assert told("vade", "mc_grpo") == told("brorl") == told("drive", drive={"sizes": [1], "batches": []}) == []


def test_each_step_of_a_ramp() -> None:
    """12 rollouts of 32 rows leave 8 rows empty."""
    stages = told("brorl", brorl={"ramp": [[0, 2], [2, 8], [4, 12]]})
    assert stages == [
        ("from batch 2", "4 groups with 8 rollouts each; 32 rows generated, 32 of 32 trained"),
        ("from batch 4", "2 groups with 12 rollouts each; 24 rows generated, 24 of 32 trained"),
    ]


def test_each_phase_of_a_curriculum_with_its_token_limit() -> None:
    """Without a reward all prompts are equally hard, and the set has the size that it will have."""
    params = dict(sizes=[1, 8, 2], batches=[4, 3], rollouts=[4, 8, 8], max_tokens=[6, 12, 12], when_short="fewer")
    assert told("drive", drive=params) == [
        ("from batch 4", "4 groups with 8 rollouts each, at most 12 tokens; 32 rows generated, 32 of 32 trained"),
        ("from batch 7", "2 groups with 8 rollouts each, at most 12 tokens; 16 rows generated, 16 of 32 trained"),
    ]


def test_what_other_methods_add_to_each_stage() -> None:
    stages = told("brorl", "sol_rl_select", brorl={"ramp": [[1, 8]]}, sol_rl_select={"oversample": 2})
    each = "16 (8 trained, 8 made to leave)"
    assert stages == [("from batch 1", f"4 groups with {each} rollouts each; 64 rows generated, 32 of 32 trained")]


@pytest.mark.parametrize(
    ("name", "params"),
    [("brorl", {"ramp": [[50, 33]]}), ("drive", {"sizes": [1, 0.5], "batches": [4], "rollouts": [4, 64]})],
)
def test_a_later_stage_that_does_not_fit_is_refused_in_the_first_batch(name: str, params: dict[str, Any]) -> None:
    stack = build_stack([name], {name: params})
    with pytest.raises(MethodError, match="Make the batch larger"):
        planner(stack, 32)()


@pytest.mark.parametrize(
    ("name", "params", "plays"), [("turn_control", {"environment": Grid}, True), ("vade", {}, False)]
)
def test_what_reward_functions_read_of_an_agent_is_told(name: str, params: dict[str, Any], plays: bool) -> None:
    stack = build_stack([name], {name: params})
    assert ("rewards read" in dict(plan_lines(stack, planner(stack, 32)(), 32, "8"))) == plays
