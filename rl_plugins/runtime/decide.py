"""What becomes of a generated batch: rewards, selection, advantages, shaping, observation.

An adapter gathers its rows, calls `decide` (or its halves, `select_rows` and `settle`) and applies the `Decision`.
Nothing here knows a host, so both hosts decide alike on the same rollouts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from rl_plugins.errors import MethodError
from rl_plugins.groups import Groups
from rl_plugins.method import Method
from rl_plugins.rollouts import Rollouts, Shape, Tokens
from rl_plugins.runtime.stack import MethodStack

Estimator = Callable[[Rollouts], Tensor]


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
    if rollouts.turns is not None and within.turn is not None:
        within = within.replace(turn=_renumbered(keep[rollouts.turns.row])[within.turn])
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
        # rows that left have no tokens here; `row` and `turn` point into all rows and turns
        everywhere = within.replace(row=tokens.row[stay], turn=None if tokens.turn is None else tokens.turn[stay])
        stack.call("observe", m, rollouts, everywhere, dict(stack.stats))
    stack.batch, stack.draw = stack.batch + 1, 0
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
        if rollouts.turns is None or tokens.turn is None:
            raise MethodError(
                f"Method `{m.name}` makes one advantage per turn, and this batch does not say what its turns are "
                f"({'rollouts.turns' if rollouts.turns is None else 'tokens.turn'} is None). Hosts tell that to "
                f'methods with "turns" in `needs`; a method without turns has advantages_per = "row".'
            )
        n, place = len(rollouts.turns.row), tokens.turn
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
