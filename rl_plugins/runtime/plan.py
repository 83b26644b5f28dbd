"""What is generated: the plan of a batch, from the methods that select prompts and plan rollouts.

An adapter calls `first_plan`, and `next_plan` for further rounds. Nothing here knows a host.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from numbers import Integral
from typing import Any

from rl_plugins.errors import MethodError
from rl_plugins.method import Method
from rl_plugins.rollouts import Plan, PlanRow, PromptPool
from rl_plugins.runtime.stack import MethodStack


def first_plan(
    stack: MethodStack,
    proposal: Sequence[int],
    group_size: int,
    budget: int,
    pool_size: int | None,
    dataset: Any = None,
) -> Plan:
    """The plan of round 0: prompts, and how many rollouts each gets.

    A plan that trains fewer rollouts than the batch holds is filled with further prompts, as long as they fit: those
    `select_prompts` names, else the next of the driver's own permutation. Methods with rounds fill their batch
    themselves.

    Where a rollout becomes k rows the batch holds a k-th of the host's prompts. They come from the driver's own
    permutation, too: the host goes on k times as fast, and the prompts it proposes beyond would never be trained.

    Args:
        proposal: the prompts the host would take next.
        group_size: rollouts per prompt that are trained.
        budget: rows the host's batch holds.
        pool_size: rows of the dataset, None for a stream (only the proposal's prompts exist then).

    Raises:
        MethodError: more rows to train than the batch holds (with the plan), none at all, or an illegal plan or
            selection.
    """
    stack.draw += 1
    rows: list[PlanRow] = []
    taken: dict[int, None] = {}  # an ordered set
    if stack.rows_per_rollout > 1:
        budget, proposal = _rollout_budget(stack, proposal, group_size, budget, pool_size)
    count = len(proposal) or budget // group_size
    prompts = _select(stack, proposal, (), count, pool_size, dataset)
    while prompts:
        room = budget - sum(r.n for r in rows)
        start = max((r.group for r in rows), default=-1) + 1
        asked = Plan(
            tuple(PlanRow(p, start + i, group_size) for i, p in enumerate(prompts)), group_size, room, batch=stack.batch
        )
        plan = _chain_plan(stack, asked, stack.claims["plan"], pool_size)
        if not rows:
            _check_size(plan, room)
        added = list(plan.rows)
        while rows and sum(r.n for r in added) > room:  # of further prompts only those that fit, in whole groups
            added = [r for r in added if r.group != added[-1].group]
        rows += added
        trained, groups = sum(r.n for r in rows), len({r.group for r in rows})
        if not sum(r.n for r in added) or any(m.rounds for m in stack.methods) or pool_size is None:
            break
        more = (budget - trained) // max(1, round(trained / groups))
        taken |= dict.fromkeys([*prompts, *(r.prompt_index for r in added if r.prompt_index >= 0)])
        prompts = _select(stack, (), tuple(taken), min(more, pool_size - len(taken)), pool_size, dataset)
    if not rows:
        names = ", ".join(f"`{m.name}`" for m in stack.claims["plan"])
        raise MethodError(
            f"The plan of {names} asks for no rollout at all, so there is nothing to train on. A method that leaves "
            f"out prompts must leave some."
        )
    return Plan(tuple(rows), group_size, budget - sum(r.n for r in rows), batch=stack.batch)


def admitted_prompts(
    stack: MethodStack, proposal: Sequence[int], n: int, group_size: int, pool_size: int | None, dataset: Any
) -> list[PlanRow]:
    """Plan rows of `n` new groups beside those that wait: of other prompts, those `select_prompts` names, else the next
    of the driver's own permutation. The proposal's serve as long as they are all a run has ever needed, so that one
    that begins no more than it trains sees the host's own batches. The plan hooks see them and keep their number."""
    stack.draw += 1
    waiting = tuple(
        dict.fromkeys(int(g["row"]["prompt_index"]) for g in stack.carried if g["row"]["prompt_index"] >= 0)
    )
    if pool_size is None:
        prompts = list(proposal)[:n]
    else:
        hosts = n == len(proposal) and not stack.carried and not stack.extra_prompts
        wanted = min(n, pool_size - len(waiting))
        prompts = _select(stack, proposal if hosts else (), waiting, wanted, pool_size, dataset)
    rows = tuple(PlanRow(p, i, group_size) for i, p in enumerate(prompts))
    plan = Plan(rows, group_size, len(rows) * group_size, batch=stack.batch)
    return list(_chain_plan(stack, plan, stack.claims["plan"], pool_size).rows)


def _rollout_budget(
    stack: MethodStack, proposal: Sequence[int], group_size: int, budget: int, pool_size: int | None
) -> tuple[int, Sequence[int]]:
    """Rollouts the batch holds, and the prompts to begin with: none (the driver's own), or the first of a stream."""
    rollouts = budget // stack.rows_per_rollout
    if rollouts < group_size:
        who = max(stack.methods, key=lambda m: m.rows_per_rollout)
        raise MethodError(
            f"`{who.name}` makes up to {who.rows_per_rollout} rows of a rollout, so a group of {group_size} rollouts "
            f"needs {who.rows_per_rollout * group_size} rows, and the batch holds {budget}. Make the batch larger, or "
            f"the group or the number of rows of a rollout smaller."
        )
    return rollouts, () if pool_size is not None else proposal[: rollouts // group_size]


def next_plan(stack: MethodStack, plan: Plan) -> Plan:
    """The plan of a later round, from methods with `rounds = True`: empty when nobody asks for anything.

    Args:
        plan: empty rows, the round, the rewards so far, the rest of the budget.
    """
    result = _chain_plan(stack, plan, [m for m in stack.claims["plan"] if m.rounds])
    _check_size(result, plan.budget)
    return result


def _chain_plan(stack: MethodStack, plan: Plan, methods: Sequence[Method], pool_size: int | None = None) -> Plan:
    for m in methods:
        new = stack.call("plan", m, plan)
        if new is not None:
            if not isinstance(new, Plan):
                raise stack.refuse(m, "plan", f"{type(new).__name__} instead of a Plan.")
            for row in new.rows:
                problem = _row_problem(row, pool_size)
                if problem:
                    raise stack.refuse(m, "plan", f"{problem}: {row}.")
            plan = new.replace(rows=tuple(r for r in new.rows if r.n + r.spare > 0))
    return plan


def _row_problem(row: Any, pool_size: int | None) -> str | None:
    """What is illegal about a plan row."""
    if not isinstance(row, PlanRow):
        return f"{type(row).__name__} instead of a PlanRow"
    if not all(isinstance(v, Integral) for v in (row.prompt_index, row.group, row.n, row.spare)):
        return "`prompt`, `group`, `n` and `spare` must be whole numbers"
    if row.n < 0 or row.spare < 0 or len(row.given) > row.n + row.spare:
        return f"{row.n} + {row.spare} rollouts, {len(row.given)} given"
    if row.prompt_index < -1 or (pool_size is not None and row.prompt_index >= pool_size):
        return f"prompt {row.prompt_index} of a dataset of {'unknown' if pool_size is None else pool_size} rows"
    if row.prompt_index == -1 and not row.edit:
        return "a foreign prompt (-1) without columns in `edit`"
    if row.max_tokens is not None and row.max_tokens < 1:
        return f"max_tokens={row.max_tokens}"
    if any(not c.tokens for c in row.given):
        return "a given completion without tokens"
    if any(c.logprobs is not None and len(c.logprobs) != len(c.tokens) for c in row.given):
        return "a given completion needs as many log-probs as tokens, or None"
    return None


def _check_size(plan: Plan, budget: int) -> None:
    if plan.trained > budget:
        listed = ", ".join(
            f"prompt {r.prompt_index}: {r.n}" + (f"+{r.spare}" if r.spare else "") for r in plan.rows[:16]
        )
        raise MethodError(
            f"The plan trains {plan.trained} rows, the batch takes {budget}. Plan (trained+spare): {listed}"
            f"{', ..' if len(plan.rows) > 16 else ''}. Rollouts beyond the batch must be `spare`, or the batch larger."
        )


def _select(
    stack: MethodStack, proposal: Sequence[int], taken: tuple[int, ...], n: int, pool_size: int | None, dataset: Any
) -> list[int]:
    if n <= 0:
        return []
    if not stack.claims["select_prompts"]:
        return list(proposal) if proposal else _own_prompts(stack, n, set(taken), pool_size or 0)
    m = stack.claims["select_prompts"][0]
    if pool_size is None:
        raise MethodError(
            f"Method `{m.name}` selects prompts, and the dataset is a stream, whose rows cannot be taken by number. "
            f"Use a dataset with random access, or remove `{m.name}` from `methods`."
        )
    answer = stack.one("select_prompts", PromptPool(pool_size, tuple(proposal), taken, dataset, stack.batch), n)
    try:
        chosen = [operator.index(i) for i in answer]
    except TypeError:
        raise stack.refuse(
            m, "select_prompts", f"{n} dataset rows (integers) are needed, it gave {answer!r}."
        ) from None
    if len(chosen) != n or len(set(chosen)) != n or not all(0 <= i < pool_size for i in chosen):
        raise stack.refuse(
            m,
            "select_prompts",
            f"{n} different prompts of 0..{pool_size - 1} were asked for, it gave "
            f"{len(chosen)} ({len(set(chosen))} different): {chosen[:20]}.",
        )
    again = sorted(set(chosen) & set(taken))
    if again:
        raise stack.refuse(m, "select_prompts", f"the prompts {again[:20]} are in the batch already (`pool.taken`).")
    return chosen


def _own_prompts(stack: MethodStack, n: int, taken: set[int], size: int) -> list[int]:
    """The next prompts of the driver's own endless permutation of the dataset. Only its position is state."""
    import numpy as np

    out: list[int] = []
    shuffled, order = -1, np.empty(0, dtype=np.int64)
    while len(out) < n and len(taken) < size:
        epoch, place = divmod(stack.extra_prompts, size)
        if epoch != shuffled:
            shuffled, order = epoch, np.random.default_rng([stack.seed, epoch]).permutation(size)
        prompt = int(order[place])
        stack.extra_prompts += 1
        if prompt not in taken:
            taken.add(prompt)
            out.append(prompt)
    return out
