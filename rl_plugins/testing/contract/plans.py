"""What is generated: plans, and the prompts chosen."""

from __future__ import annotations

from rl_plugins.core.rollouts import PlanRow, PromptPool
from rl_plugins.testing.contract.kit import BUDGET, GROUP_SIZE, GROUPS, PROMPTS, Kit
from rl_plugins.testing.data import make_plan


def check_plans(kit: Kit) -> bool:
    """plans: prompts kept, whole numbers of rollouts within the budget, nothing accumulates"""
    if "plan" not in kit.cls.claims():
        return False
    uneven = tuple(PlanRow(i, i, n) for i, n in enumerate((2, 4, 6, 4)))
    for name, plan in (
        ("the host's plan", make_plan(GROUPS, GROUP_SIZE)),
        ("a plan with room", make_plan(GROUPS, GROUP_SIZE, budget=2 * BUDGET)),
        ("an uneven plan", make_plan(GROUPS, GROUP_SIZE).replace(rows=uneven)),
    ):
        with kit.at(name):
            stack = kit.stack()
            planned = [stack.call("plan", stack.methods[-1], plan) or plan for _ in range(3)]
            for p in planned:
                given = {row.prompt_index for row in plan.rows}
                foreign = sorted({row.prompt_index for row in p.rows} - given - {-1})
                if foreign and "select_prompts" not in kit.cls.claims():
                    kit.fail(
                        f"`plan` has the prompts {foreign}, which were not chosen; those given are {sorted(given)}."
                    )
                if any(row.n < 0 or row.spare < 0 for row in p.rows):
                    kit.fail("`plan` has a negative number of rollouts.")
                if p.trained > plan.budget:
                    kit.fail(f"`plan` trains {p.trained} rows of a budget of {plan.budget}; others must be `spare`.")
            made = [p.generated for p in planned]
            if made[-1] > made[0]:
                kit.fail(f"`plan` accumulates: called with the same plan again it makes {made} rollouts.")
    return True


def check_prompts(kit: Kit) -> bool:
    """prompts chosen: as many as asked for, all different, in range, none taken"""
    if "select_prompts" not in kit.cls.claims():
        return False
    for n, taken in ((GROUPS, ()), (GROUPS, (0, 5, 6)), (1, ()), (PROMPTS, ()), (3, tuple(range(PROMPTS - 3)))):
        with kit.at(f"{n} of {PROMPTS} prompts, {len(taken)} taken"):
            stack = kit.stack()
            free = [i for i in range(PROMPTS) if i not in taken]
            pool = PromptPool(PROMPTS, () if taken else tuple(free[:n]), taken, kit.dataset, 0)
            chosen = [int(i) for i in stack.one("select_prompts", pool, n)]
            if len(chosen) != n or len(set(chosen)) != n or not set(chosen) <= set(free):
                kit.fail(f"`select_prompts` must return n different prompts that are not taken; it gave {chosen}.")
    return True
