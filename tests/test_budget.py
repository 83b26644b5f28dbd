"""What the batches of a run come to on paper, and that it is what methods make of them."""

from __future__ import annotations

from typing import Any

import pytest
from one_method import method

from rl_plugins.core.errors import MethodError
from rl_plugins.core.rollouts import Budget
from rl_plugins.runtime import registry
from rl_plugins.runtime.budget import budgets, described
from rl_plugins.runtime.stack import MethodStack, build_stack
from rl_plugins.testing.contract.kit import Kit
from rl_plugins.testing.contract.plans import check_budget
from rl_plugins.testing.data import make_run

DOTS = {"embeddings": lambda data: [[1.0]] * 16, "references": 4}


def told(*names: str, host: str = "trl", rows: int = 32, group_size: int = 4, **params: Any) -> list[str]:
    run = make_run(host=host, group_size=group_size)
    return [
        f"{b.stage}: {described(b)}" if b.stage else described(b)
        for b in budgets(build_stack(names, params), run, rows)
    ]


@pytest.mark.parametrize(
    ("names", "params", "expected"),
    [
        (["vade"], {}, "8 prompts with 4 rollouts each; 32 rows generated in 1 round, 32 trained"),
        (["mc_grpo"], {}, "8 prompts with 4 rollouts each; 40 rows generated in 1 round, 32 trained"),
        (["grpo_roc"], {}, "8 prompts with 4 rollouts each; 64 rows generated in 1 round, 0 to 32 trained"),
        (["v0"], {}, "8 prompts with 2 to 18 rollouts each; 32 rows generated in 1 round, 32 trained"),
        (
            ["v0"],
            {"v0": {"max_rollouts": 8}},
            "8 prompts with 2 to 8 rollouts each; 32 rows generated in 1 round, 32 trained",
        ),
        (
            ["v0_5"],
            {"v0_5": {"k_init": 2, "k_max": 8}},
            "8 prompts with 2 to 8 rollouts each; 16 to 32 rows generated in up to 7 rounds, 16 to 32 trained",
        ),
        (
            ["v0", "mc_grpo", "grpo_roc"],
            {"v0": {"max_rollouts": 8}},
            "8 prompts with 2 to 8 rollouts each; 72 to 80 rows generated in 1 round, 0 to 32 trained",
        ),
        (
            ["mssr_baseline"],
            {},
            "16 prompts with 1 rollouts each; 16 rows generated in 1 round, 16 trained",  # the dataset has no more
        ),
        (
            ["april"],
            {"april": {"over_sampling": 1.5}},
            "8 to 12 prompts with 4 rollouts each; 32 to 48 rows generated in 1 round, 32 trained",
        ),
        (
            ["echo_labels"],
            {"echo_labels": {"n_votes": 6}},
            "8 prompts with 4 rollouts each; 48 rows generated in 1 round, 32 trained",
        ),
    ],
)
def test_what_methods_make_of_a_batch(names: list[str], params: dict[str, Any], expected: str) -> None:
    assert told(*names, **params) == [expected]


def test_stages_of_a_cycle() -> None:
    with_references = "12 prompts with 4 rollouts each; 48 rows generated in {}, 32 trained"
    others = "the others: 8 prompts with 4 rollouts each; 32 rows generated in 1 round, 32 trained"
    assert told("dots", dots=DOTS) == [
        "the first batch of every 2: " + with_references.format("up to 2 rounds"),
        others,
    ]
    assert told("dots", dots={**DOTS, "reference": "previous"}) == [
        "the last batch of every 2: " + with_references.format("1 round"),
        others,
    ]
    assert told("dots", dots={**DOTS, "cycle": 1}) == [with_references.format("up to 2 rounds")]


def test_a_host_with_groups_begun_ahead_begins_as_many_as_it_trains() -> None:
    assert told("april", host="verl") == ["8 prompts with 4 rollouts each; 32 rows generated in 1 round, 32 trained"]


def test_stages_of_several_methods_are_named_together() -> None:
    def stages(*names: str) -> Any:
        return lambda budget, run: [budget.replace(stage=name, rounds=budget.rounds + 1) for name in names]

    stack = MethodStack([method(name="first", budget=stages("a", "b")), method(name="second", budget=stages("c"))])
    found = budgets(stack, make_run(), 16)
    assert [(b.stage, b.rounds) for b in found] == [("a; c", 3), ("b; c", 3)]
    assert budgets(MethodStack([method(budget=lambda b, run: b)]), make_run(), 16) == [
        Budget((4, 4), (4, 4), (16, 16), (16, 16))
    ]


def test_a_rollout_of_several_rows_takes_their_room() -> None:
    one = method(rollout=lambda prompt: None)
    one.rows_per_rollout = 2
    assert budgets(MethodStack([one]), make_run(), 32) == [Budget((4, 4), (4, 4), (16, 32), (16, 32))]


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (20, "int instead of a Budget, or of one per stage: 20"),
        ([], "list instead of a Budget"),
        ({"trained": (5, 4)}, "`trained` must be two whole numbers, the least and the most"),
        ({"generated": (-1, 4)}, "`generated` must be"),
        ({"prompts": 4}, "`prompts` must be"),
        ({"per_prompt": (1.5, 4)}, "`per_prompt` must be"),
        ({"rounds": 65}, "`rounds` must be a whole number from 1 to 64"),
        ({"stage": None}, "`stage` must be a text"),
    ],
)
def test_what_no_batch_can_be_is_refused_by_name(answer: Any, message: str) -> None:
    def change(given: Budget, run: Any) -> Any:
        return given.replace(**answer) if isinstance(answer, dict) else answer

    with pytest.raises(MethodError, match="illegal from `budget`") as caught:
        budgets(MethodStack([method(name="toy", budget=change)]), make_run(), 16)
    assert message in str(caught.value) and "`toy`" in str(caught.value)


@pytest.mark.parametrize(
    ("before", "name"),
    [(["v0"], "mc_grpo"), (["v0"], "grpo_roc"), (["v0", "mc_grpo"], "grpo_roc"), (["v0_5"], "grpo_roc")],
)
def test_batches_of_several_methods_are_within_their_budget(before: list[str], name: str) -> None:
    """The check of the contract test, which reads the plans of a small host."""
    kit = Kit(registry.load(name), {}, None)
    assert check_budget(kit, *build_stack(before, {"v0_5": {"k_init": 2}} if "v0_5" in before else {}).methods)
    assert not kit.problems
