"""One generation batch on the driver, the same for every host: what is generated, and what becomes of it.

A host adapter gathers its rows, calls `first_plan`, `next_plan` and `decide`, and applies the `Decision`. Nothing here
knows a host, so both hosts decide alike on the same rollouts.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from rl_plugins.errors import MethodError
from rl_plugins.groups import Groups
from rl_plugins.method import Method
from rl_plugins.rollouts import Plan, PlanRow, PromptPool, Rollouts, Shape, Tokens
from rl_plugins.stack import MethodStack

Estimator = Callable[[Rollouts], Tensor]


# ---- generation


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
            tuple(PlanRow(p, start + i, group_size) for i, p in enumerate(prompts)), group_size, room, step=stack.step
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
        taken |= dict.fromkeys([*prompts, *(r.prompt for r in added if r.prompt >= 0)])
        prompts = _select(stack, (), tuple(taken), min(more, pool_size - len(taken)), pool_size, dataset)
    if not rows:
        names = ", ".join(f"`{m.name}`" for m in stack.claims["plan"])
        raise MethodError(
            f"The plan of {names} asks for no rollout at all, so there is nothing to train on. A method that leaves "
            f"out prompts must leave some."
        )
    return Plan(tuple(rows), group_size, budget - sum(r.n for r in rows), step=stack.step)


def admitted_prompts(
    stack: MethodStack, proposal: Sequence[int], n: int, group_size: int, pool_size: int | None, dataset: Any
) -> list[PlanRow]:
    """Plan rows of `n` new groups beside those that wait: of other prompts, those `select_prompts` names, else the next
    of the driver's own permutation. The proposal's serve as long as they are all a run has ever needed, so that one
    that begins no more than it trains sees the host's own batches. The plan hooks see them and keep their number."""
    stack.draw += 1
    waiting = tuple(dict.fromkeys(int(g["row"]["prompt"]) for g in stack.carried if g["row"]["prompt"] >= 0))
    if pool_size is None:
        prompts = list(proposal)[:n]
    else:
        hosts = n == len(proposal) and not stack.carried and not stack.extra_prompts
        wanted = min(n, pool_size - len(waiting))
        prompts = _select(stack, proposal if hosts else (), waiting, wanted, pool_size, dataset)
    rows = tuple(PlanRow(p, i, group_size) for i, p in enumerate(prompts))
    plan = Plan(rows, group_size, len(rows) * group_size, step=stack.step)
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
    if not all(isinstance(v, Integral) for v in (row.prompt, row.group, row.n, row.spare)):
        return "`prompt`, `group`, `n` and `spare` must be whole numbers"
    if row.n < 0 or row.spare < 0 or len(row.given) > row.n + row.spare:
        return f"{row.n} + {row.spare} rollouts, {len(row.given)} given"
    if row.prompt < -1 or (pool_size is not None and row.prompt >= pool_size):
        return f"prompt {row.prompt} of a dataset of {'unknown' if pool_size is None else pool_size} rows"
    if row.prompt == -1 and not row.edit:
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
        listed = ", ".join(f"prompt {r.prompt}: {r.n}" + (f"+{r.spare}" if r.spare else "") for r in plan.rows[:16])
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
    answer = stack.one("select_prompts", PromptPool(pool_size, tuple(proposal), taken, dataset, stack.step), n)
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


# ---- decisions


@dataclass(frozen=True)
class Decision:
    """What becomes of every generated row and token, in the order they were given.

    Attributes:
        rollouts: with the rewards that were used and `kept` as `select` left it.
        stays: (rows,) bool, False for rows a method took out. A row the host itself masked (no tokens) stays: it is
            the host's, which may count it in a mean over rows.
        trained: (rows,) bool, rows that stay and have a token in the update.
        keep_tokens: (tokens,) bool, tokens that stay in the update.
        advantages: (tokens,) float64; 0 for tokens that left.
        row_advantages: (rows,) float64, mean over the row's tokens, for the logs.
        uniform: every row's tokens have one advantage.
        old_logprobs: (tokens,) or None.
        row_columns, token_columns: for the loss.
        rewarded_by: methods whose `rewards` hook changed the reward, in order -> (rows,) what each made of it.
        estimator: who made the advantages: a method's name, "host" or "rl_plugins".
    """

    rollouts: Rollouts
    stays: Tensor
    trained: Tensor
    keep_tokens: Tensor
    advantages: Tensor
    row_advantages: Tensor
    uniform: bool
    old_logprobs: Tensor | None
    row_columns: dict[str, Tensor]
    token_columns: dict[str, Tensor]
    rewarded_by: dict[str, Tensor]
    estimator: str


@dataclass(frozen=True)
class Selection:
    """What the `rewards` and `select` hooks made of the rollouts.

    Attributes:
        rollouts: with the rewards to use, and `kept` as `select` left it.
        rewarded_by: as in `Decision`.
    """

    rollouts: Rollouts
    rewarded_by: dict[str, Tensor]


def decide(
    stack: MethodStack,
    rollouts: Rollouts,
    tokens: Tokens,
    host_advantages: Tensor | None,
    estimator: Estimator,
    budget: int,
) -> Decision:
    """Rewards, selection, advantages, shaping and observation, in this order, for a host that has everything at once.

    Args:
        rollouts, tokens: all generated rows; fillers of the host must not be among them.
        host_advantages: (rows,) the host's own, valid if nothing changed groups or rewards; else None.
        estimator: ours, equal to the host's on equal groups, for when the host's numbers mean nothing.
        budget: rows the host's batch holds.

    Raises:
        MethodError: see `select_rows` and `settle`.
    """
    selection = select_rows(stack, rollouts)
    unchanged = bool(selection.rollouts.kept.all()) and not selection.rewarded_by
    of_tokens = host_advantages[tokens.row] if host_advantages is not None and unchanged else None
    return settle(stack, selection, tokens, of_tokens, estimator, budget)


def select_rows(stack: MethodStack, rollouts: Rollouts) -> Selection:
    """`rewards` and `select`: what needs no token, so that a host can leave rows out before it computes log-probs.

    Raises:
        MethodError: from a hook, for an illegal return value, for infinite rewards, or when no row has a reward.
    """
    rewarded_by: dict[str, Tensor] = {}
    for m in stack.claims["rewards"]:
        new = stack.call("rewards", m, rollouts)
        if new is not None:
            reward = _per_row(stack, m, "rewards", new, rollouts).double()
            if bool(torch.isinf(reward).any()):
                raise stack.refuse(m, "rewards", "a reward is infinite; NaN is what a row without a reward gets.")
            rollouts = rollouts.replace(reward=reward)
            rewarded_by[m.name] = reward
    if bool(torch.isinf(rollouts.reward).any()):
        columns = zip(rollouts.reward_names, rollouts.rewards.unbind(1), strict=True)
        names = ", ".join(name for name, column in columns if bool(torch.isinf(column).any()))
        raise MethodError(
            f"A reward is infinite ({names or 'their weighted sum'}); rewards must be finite numbers, or None/NaN "
            f"where a row has none."
        )
    if len(rollouts) and bool(torch.isnan(rollouts.reward).all()):
        raise MethodError(
            f"Not one of the {len(rollouts)} completions has a reward: every reward function "
            f"({', '.join(rollouts.reward_names)}) returned None or NaN for all of them. Nothing can be learned from "
            f"this batch; check the reward functions and the columns they read."
        )
    keep = rollouts.kept
    for m in stack.claims["select"]:
        stays = stack.call("select", m, rollouts.replace(kept=keep))
        if stays is not None:
            keep = keep & _bool(stack, m, "select", "the mask", _per_row(stack, m, "select", stays, rollouts))
    return Selection(rollouts.replace(kept=keep), rewarded_by)


def settle(
    stack: MethodStack,
    selection: Selection,
    tokens: Tokens,
    host_advantages: Tensor | None,
    estimator: Estimator,
    budget: int,
) -> Decision:
    """Advantages, shaping and observation of what `select` left.

    Args:
        tokens: of all rows, or of those that `select` left; `row` points into all rows.
        host_advantages: (tokens,) the host's own, None if they mean nothing for these rows.
        estimator, budget: as in `decide`.

    Raises:
        MethodError: from a hook, for an illegal return value, or when more rows stay than the batch holds.
    """
    rollouts, rewarded_by = selection.rollouts, selection.rewarded_by
    keep = rollouts.kept
    inside = rollouts.subset(keep)  # what left is out of every statistic
    stay = keep[tokens.row]
    within = tokens.subset(stay, _renumbered(keep))
    if rollouts.steps is not None and within.step is not None:
        within = within.replace(step=_renumbered(keep[rollouts.steps.row])[within.step])
    if stack.claims["advantages"]:
        m = stack.claims["advantages"][0]
        source, values = m.name, _advantages(stack, m, inside, within)
    elif host_advantages is not None:
        source, values = "host", host_advantages.double()[stay]
    else:
        source, values = "rl_plugins", estimator(inside)[within.row]
    nothing = torch.isnan(values) | torch.isnan(inside.reward)[within.row]
    within = within.replace(advantages=torch.where(nothing, 0.0, values))

    row_columns: dict[str, Tensor] = {}
    token_columns: dict[str, Tensor] = {}
    old_logprobs = None
    stays = torch.ones(len(inside), dtype=torch.bool)
    for m in stack.claims["shape"]:
        shaped = stack.call("shape", m, inside, within)
        if shaped is None:
            continue
        within = _apply_shape(stack, m, shaped, inside, within, row_columns, token_columns)
        if shaped.keep_rows is not None:
            stays &= torch.as_tensor(shaped.keep_rows, device="cpu")
        if shaped.old_logprobs is not None:
            old_logprobs = within.old_logprobs

    for m in stack.claims["observe"]:
        # rows that left have no tokens here; `row` and `step` point into all rows and steps
        everywhere = within.replace(row=tokens.row[stay], step=None if tokens.step is None else tokens.step[stay])
        stack.call("observe", m, rollouts, everywhere, dict(stack.stats))
    stack.step, stack.draw = stack.step + 1, 0
    return _decision(
        rollouts,
        inside,
        within,
        stays,
        keep,
        stay,
        tokens,
        row_columns,
        token_columns,
        old_logprobs,
        rewarded_by,
        source,
        budget,
    )


def _decision(
    rollouts: Rollouts,
    inside: Rollouts,
    within: Tokens,
    stays: Tensor,
    keep: Tensor,
    stay: Tensor,
    tokens: Tokens,
    row_columns: dict[str, Tensor],
    token_columns: dict[str, Tensor],
    old_logprobs: Tensor | None,
    rewarded_by: dict[str, Tensor],
    source: str,
    budget: int,
) -> Decision:
    """Back to the coordinates of all rows and tokens."""

    def rows_back(x: Tensor) -> Tensor:
        full = torch.zeros(len(rollouts), dtype=x.dtype)
        full[keep] = x
        return full

    def tokens_back(x: Tensor) -> Tensor:
        full = torch.zeros(len(tokens), dtype=x.dtype)
        full[stay] = x
        return full

    of_row = Groups(within.row, count=len(inside))
    live = torch.where(within.keep, within.advantages, torch.nan)
    trained = of_row.n(live) > 0
    stays = stays & (trained | (of_row.size == 0))  # a row whose every token left is gone, too
    if int(stays.sum()) > budget:
        groups = Groups(inside.group[stays])
        sizes = list(zip(groups.ids.tolist(), groups.size.tolist(), strict=True))
        listed = ", ".join(f"group {g}: {n}" for g, n in sizes[:32])
        raise MethodError(
            f"{int(stays.sum())} rows would be trained, the batch takes {budget}. Rows that stayed: {listed}"
            f"{', ..' if len(sizes) > 32 else ''}. The method that asked for spare rollouts must make them leave "
            f"(`select` or `shape`)."
        )
    return Decision(
        rollouts=rollouts,
        stays=rows_back(stays),
        trained=rows_back(trained),
        keep_tokens=tokens_back(within.keep),
        advantages=tokens_back(torch.where(within.keep, within.advantages, 0.0)),
        row_advantages=rows_back(torch.nan_to_num(of_row.mean(live), nan=0.0)),
        uniform=not bool((of_row.max(live) > of_row.min(live)).any()),
        old_logprobs=None if old_logprobs is None else tokens_back(old_logprobs),
        row_columns={k: rows_back(v) for k, v in row_columns.items()},
        token_columns={k: tokens_back(v) for k, v in token_columns.items()},
        rewarded_by=rewarded_by,
        estimator=source,
    )


def _renumbered(keep: Tensor) -> Tensor:
    """Old number -> new number of what stays."""
    return torch.cumsum(keep, 0) - 1


def _numbers(stack: MethodStack, m: Method, hook: str, what: str, value: Any) -> Tensor:
    try:
        return torch.as_tensor(value, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as e:
        why = f"{what} must be a tensor (or numbers that make one), it gave {type(value).__name__}: {e}."
        raise stack.refuse(m, hook, why) from None


def _bool(stack: MethodStack, m: Method, hook: str, what: str, given: Tensor) -> Tensor:
    if given.dtype != torch.bool:
        raise stack.refuse(m, hook, f"{what} must be a bool tensor, it gave {given.dtype}.")
    return given


def _per_row(stack: MethodStack, m: Method, hook: str, value: Any, rollouts: Rollouts) -> Tensor:
    given = _numbers(stack, m, hook, "the answer", value)
    if given.shape != (len(rollouts),):
        raise stack.refuse(m, hook, f"one number per row ({len(rollouts)}) is needed; it gave {tuple(given.shape)}.")
    return given


def _advantages(stack: MethodStack, m: Method, rollouts: Rollouts, tokens: Tokens) -> Tensor:
    """(tokens,) advantages of the row or turn each token belongs to, as `m.advantages_per` says."""
    n, place = len(rollouts), tokens.row
    if m.advantages_per == "turn":
        if rollouts.steps is None or tokens.step is None:
            raise MethodError(
                f"Method `{m.name}` makes one advantage per turn, and this batch does not say what its turns are "
                f"({'rollouts.steps' if rollouts.steps is None else 'tokens.step'} is None). Hosts tell that to "
                f'methods with "steps" in `needs`; a method without turns has advantages_per = "row".'
            )
        n, place = len(rollouts.steps.row), tokens.step
    given = _numbers(stack, m, "advantages", "the advantages", stack.one("advantages", rollouts)).double()
    if bool(torch.isinf(given).any()):
        raise stack.refuse(m, "advantages", "an advantage is infinite.")
    if given.shape != (n,):
        why = (
            f"one number per {m.advantages_per} ({n}) is needed, as the class says with advantages_per = "
            f'"{m.advantages_per}"; it gave {tuple(given.shape)}.'
        )
        raise stack.refuse(m, "advantages", why)
    return given[place]


def _apply_shape(
    stack: MethodStack,
    m: Method,
    shaped: Any,
    rollouts: Rollouts,
    tokens: Tokens,
    row_columns: dict[str, Tensor],
    token_columns: dict[str, Tensor],
) -> Tokens:
    if not isinstance(shaped, Shape):
        raise stack.refuse(m, "shape", f"{type(shaped).__name__} instead of a Shape.")

    def sized(name: str, value: Any, n: int, kind: str) -> Tensor:
        given = _numbers(stack, m, "shape", f"`{name}`", value)
        if given.shape != (n,):
            raise stack.refuse(m, "shape", f"`{name}` needs one entry per {kind} ({n}), it has {tuple(given.shape)}.")
        if given.is_floating_point() and not bool(torch.isfinite(given).all()):
            raise stack.refuse(m, "shape", f"`{name}` has values that are not finite.")
        return given

    changes: dict[str, Tensor] = {}
    if shaped.advantages is not None:
        changes["advantages"] = sized("advantages", shaped.advantages, len(tokens), "token").double()
    if shaped.old_logprobs is not None:
        changes["old_logprobs"] = sized("old_logprobs", shaped.old_logprobs, len(tokens), "token").float()
    keep = tokens.keep
    if shaped.keep_rows is not None:
        rows = sized("keep_rows", shaped.keep_rows, len(rollouts), "row")
        keep = keep & _bool(stack, m, "shape", "`keep_rows`", rows)[tokens.row]
    if shaped.keep_tokens is not None:
        stays = sized("keep_tokens", shaped.keep_tokens, len(tokens), "token")
        keep = keep & _bool(stack, m, "shape", "`keep_tokens`", stays)
    for columns, given, n, kind in (
        (row_columns, shaped.row_columns, len(rollouts), "row"),
        (token_columns, shaped.token_columns, len(tokens), "token"),
    ):
        for name, value in given.items():
            if name in row_columns or name in token_columns:
                raise stack.refuse(m, "shape", f"the column `{name}` exists already.")
            columns[name] = sized(name, value, n, kind)
    return tokens.replace(keep=keep, **changes)
