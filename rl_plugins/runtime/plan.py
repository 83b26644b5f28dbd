"""What is generated: the plan of a batch, from the methods that select prompts and plan rollouts.

An adapter calls `first_plan`, and `next_plan` for further rounds. Nothing here knows a host.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from rl_plugins.core.errors import MethodError
from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import Plan, PlanRow, PromptPool
from rl_plugins.runtime import validate
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
        asked_rows = tuple(PlanRow(p, start + i, group_size) for i, p in enumerate(prompts))
        asked = Plan(asked_rows, group_size, room, batch=stack.batch, first=not rows)
        plan = _chain_plan(stack, asked, stack.claims["plan"], pool_size)
        if not rows:
            _check_size(plan, room)
        added = list(plan.rows)
        while rows and sum(r.n for r in added) > room:  # of further prompts only those that fit, in whole groups
            added = [r for r in added if r.group != added[-1].group]
        rows += added
        trained, groups = sum(r.n for r in rows), len({r.group for r in rows if r.n})
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
    """Plan rows of `n` new groups in addition to those that wait: of other prompts, those `select_prompts` names,
    else the next of the driver's own permutation. The proposal's serve as long as they are all a run has ever needed,
    so that one that begins no more than it trains sees the host's own batches. The plan hooks see them and keep their
    number."""
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


def next_plan(stack: MethodStack, plan: Plan, pool_size: int | None = None) -> Plan:
    """The plan of a later round, from methods with `rounds = True`: empty when nobody asks for anything.

    Args:
        plan: empty rows, the round, the rewards so far, the rest of the budget.
        pool_size: rows of the dataset, None for a stream.
    """
    result = _chain_plan(stack, plan, [m for m in stack.claims["plan"] if m.rounds], pool_size)
    _check_size(result, plan.budget)
    return result


def evaluation_plan(stack: MethodStack, rows: Sequence[PlanRow]) -> list[PlanRow]:
    """The prompts of an evaluation as methods whose `plan` acts there plan them.

    Args:
        rows: foreign prompts with all of their columns in `edit`, numbered by their groups.

    Raises:
        MethodError: from a hook, or a method plans more than edits and payloads (with a rollout program in evaluation
            also prefixes and limits).
    """
    result = list(rows)
    program = bool(in_evaluation(stack, "rollout"))
    for m in in_evaluation(stack, "plan"):
        size = max((r.n for r in result), default=1)
        asked = Plan(tuple(result), size, sum(r.n for r in result), batch=stack.batch)
        new = _chain_plan(stack, asked, [m]).rows
        limits = any(r.prefix or r.max_tokens is not None or r.max_turns is not None for r in new) and not program
        asked_for = [(r.prompt_index, r.group, r.n, 0, 0) for r in result]
        others = [(r.prompt_index, r.group, r.n, r.spare, r.redundant) for r in new] != asked_for
        if others or limits or any(r.given for r in new):
            raise MethodError(f"Method `{m.name}` {_ONLY_EDITS}")
        result = [
            new_row.replace(edit={**(row.edit or {}), **(new_row.edit or {})})
            for row, new_row in zip(result, new, strict=True)
        ]
    return result


_ONLY_EDITS = (
    "plans an evaluation in `plan` with other prompts or numbers of rollouts, given completions, prefixes or "
    "limits. In evaluation a plan may edit prompts and attach payloads, and with a rollout program also give prefixes "
    "and limits of tokens and turns."
)


def in_evaluation(stack: MethodStack, hook: str) -> list[Method]:
    """Methods whose `hook` acts in evaluation, too."""
    return [m for m in stack.claims[hook] if hook in m.in_eval]


def check_length(row: PlanRow, longest: int) -> None:
    """Refuses a prefix or given completions that do not fit into a completion of so many tokens."""
    limit = min(row.max_tokens or longest, longest)
    given = max([len(c.tokens) for c in row.given], default=0)
    if len(row.prefix) >= limit or given > longest:
        raise MethodError(
            f"The plan gives prompt {row.prompt_index} a prefix of {len(row.prefix)} and completions of up to {given} "
            f"tokens; the completion length is {limit}."
        )


def check_rewards(row: PlanRow, names: Sequence[str]) -> None:
    """Refuses rewards of given completions that are of no reward function of the run."""
    for name in (n for c in row.given for n in c.rewards or ()):
        if name not in names:
            raise MethodError(
                f"The plan gives a completion of prompt {row.prompt_index} a reward `{name}`; the reward functions are "
                f"{', '.join(names)}."
            )


def check_versions(row: PlanRow, now: int) -> None:
    """Refuses given completions whose tokens are newer than the weights there are.

    Args:
        now: the newest published weights.
    """
    for completion in row.given:
        newest = max(completion.versions or (), default=now)
        if newest > now:
            raise MethodError(
                f"The plan gives a completion of prompt {row.prompt_index} made by the weights {newest}, and the "
                f"newest published ones are {now}. A version is `rollouts.version` of this run; leave `versions` out "
                f"for completions of other runs."
            )


def split_plan(plan: Sequence[PlanRow], ranks: int) -> list[list[PlanRow]]:
    """Plan rows of each rank: whole, in order, with about equally many rollouts."""
    ends = list(itertools.accumulate(p.n + p.spare for p in plan))
    total = ends[-1] if ends else 0
    shares: list[list[PlanRow]] = [[] for _ in range(ranks)]
    for p, end in zip(plan, ends, strict=True):
        middle = end - (p.n + p.spare) / 2
        shares[min(int(middle * ranks / max(total, 1)), ranks - 1)].append(p)
    return shares


def _chain_plan(stack: MethodStack, plan: Plan, methods: Sequence[Method], pool_size: int | None = None) -> Plan:
    for m in methods:
        new = stack.call("plan", m, plan)
        if new is not None:
            with validate.invalid_returns(m, "plan"):
                new = validate.plan(m, new, plan, pool_size, stack.vocabulary)
            plan = new.replace(rows=tuple(r for r in new.rows if r.n + r.spare > 0))
    return plan


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
    if proposal and n == pool_size:
        stack.warn_once(
            f"A batch takes all {n} prompts of the dataset, so `{m.name}` has nothing to choose from. Give more "
            f"prompts, or make the batch smaller."
        )
    if n > pool_size:  # beside prompts that are taken, no more are asked for than are left
        raise MethodError(
            f"Method `{m.name}` is to select {n} prompts, and the dataset has only {pool_size}. Make the batch smaller "
            f"(fewer prompts, or more rollouts per prompt) or the dataset larger."
        )
    pool = PromptPool(pool_size, tuple(proposal), taken, dataset, stack.batch)
    chosen = stack.one("select_prompts", pool, n)
    with validate.invalid_returns(m, "select_prompts"):
        return validate.prompts(m, chosen, pool, n)


def _own_prompts(stack: MethodStack, n: int, taken: set[int], size: int) -> list[int]:
    """The next prompts of the driver's own endless permutation of the dataset. Only its position is state."""
    out: list[int] = []
    while len(out) < n and len(taken) < size:
        epoch, place = divmod(stack.extra_prompts, size)
        prompt = int(_order(stack.seed, epoch, size)[place])
        stack.extra_prompts += 1
        if prompt not in taken:
            taken.add(prompt)
            out.append(prompt)
    return out


@functools.lru_cache(maxsize=1)
def _order(seed: int, epoch: int, size: int) -> Any:
    """Of an epoch, kept until another is asked for."""
    from rl_plugins.kit.row_sets import shuffled

    return shuffled([seed, epoch], size)
