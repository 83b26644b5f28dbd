"""What hooks return, checked in one place for every hook and host: type, shape, length, dtype, finite, gradient.

Every refusal names the method and the hook, what came, and what is allowed.
"""

from __future__ import annotations

import math
import operator
import pickle
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from rl_plugins.errors import MethodError, shown
from rl_plugins.method import Method
from rl_plugins.rollouts import Admission, Completion, Plan, PlanRow, PromptPool, Rollouts, Terms, Tokens, Update

LARGEST = float(torch.finfo(torch.float32).max)  # hosts train in float32 or below


def refusal(m: Method, hook: str, why: str) -> MethodError:
    """An error for an illegal return value."""
    return MethodError(
        f"Method `{m.name}` returned something illegal from `{hook}`: {why} "
        f"Remove `{m.name}` from `methods` to go on without it."
    )


# ---- numbers


def numbers(m: Method, hook: str, what: str, value: object, n: int, kind: str) -> Tensor:
    """(n,) on the CPU, without gradient.

    Args:
        what: how messages call a field of the answer: "`keep_rows`"; empty: it is the whole answer.
        kind: what there must be one of per entry: "row".
    """
    try:
        given = torch.as_tensor(value, device="cpu").detach()
    except (TypeError, ValueError, RuntimeError) as e:
        why = f"must be a tensor (or numbers that make one), it gave {type(value).__name__}: {e}."
        raise refusal(m, hook, f"{what or 'the answer'} {why}") from None
    if given.shape != (n,):
        shape = tuple(given.shape)
        asked = f"{what} needs one entry per {kind} ({n}), it has {shape}."
        raise refusal(m, hook, asked if what else f"one number per {kind} ({n}) is needed; it gave {shape}.")
    if given.is_complex():
        raise refusal(m, hook, f"{what or 'the answer'} has complex numbers.")
    return given


def mask(m: Method, hook: str, what: str, value: object, n: int, kind: str) -> Tensor:
    """(n,) bool."""
    given = numbers(m, hook, what, value, n, kind)
    if given.dtype != torch.bool:
        raise refusal(m, hook, f"{what or 'the mask'} must be a bool tensor, it gave {given.dtype}.")
    return given


def finite(m: Method, hook: str, what: str, value: object, n: int, kind: str) -> Tensor:
    """(n,) without NaN and infinity."""
    given = numbers(m, hook, what, value, n, kind)
    if given.is_floating_point() and not bool(torch.isfinite(given).all()):
        raise refusal(m, hook, f"{what} has values that are not finite.")
    return given


# ---- rewards and advantages


def rewards(m: Method, value: object, rollouts: Rollouts) -> Tensor:
    """(rows,) float64; NaN withdraws a row. At least one row keeps a reward if one had one."""
    reward = numbers(m, "rewards", "", value, len(rollouts), "row").double()
    new = torch.isinf(reward) & ~torch.isinf(rollouts.reward)  # infinite ones it was given are not its own
    if bool(new.any()):
        raise refusal(m, "rewards", "a reward is infinite; NaN is what a row without a reward gets.")
    had = ~torch.isnan(rollouts.reward)
    if bool(had.any()) and bool(torch.isnan(reward).all()):
        why = (
            f"every reward is NaN, though {int(had.sum())} of {len(rollouts)} rows had one. NaN withdraws a row; "
            f"return None to leave all rewards as they are."
        )
        raise refusal(m, "rewards", why)
    return reward


def turns_known(m: Method, rollouts: Rollouts, tokens: Tokens) -> None:
    """Refuses a batch that does not say what its turns are, if `m` makes one advantage per turn."""
    if m.advantages_per == "turn" and (rollouts.turns is None or tokens.turn is None):
        raise MethodError(
            f"Method `{m.name}` makes one advantage per turn, and this batch does not say what its turns are "
            f"({'rollouts.turns' if rollouts.turns is None else 'tokens.turn'} is None). Hosts tell that to "
            f'methods with "turns" in `needs`; a method without turns has advantages_per = "row".'
        )


def advantages(m: Method, value: object, rollouts: Rollouts, tokens: Tokens) -> Tensor:
    """(tokens,) float64 advantages of the row or turn each token belongs to, as `m.advantages_per` says; NaN only
    where the row has no reward."""
    n, place, row = len(rollouts), tokens.row, torch.arange(len(rollouts))
    if m.advantages_per == "turn":
        assert rollouts.turns is not None and tokens.turn is not None  # see `turns_known`
        n, place, row = len(rollouts.turns.row), tokens.turn, rollouts.turns.row
    try:
        given = numbers(m, "advantages", "", value, n, m.advantages_per).double()
    except MethodError as e:
        said = f'one number per {m.advantages_per} ({n}) is needed, as the class says with advantages_per = "'
        said += f'{m.advantages_per}"; it'
        raise MethodError(str(e).replace(f"one number per {m.advantages_per} ({n}) is needed; it", said)) from None
    if bool((torch.isnan(given) & ~torch.isnan(rollouts.reward[row])).any()):
        why = (
            "an advantage is NaN, and its row has a reward. Rows without a reward stay out of every statistic (those "
            "of `rollouts.groups` leave them out); where there is nothing to compare with, the advantage is 0."
        )
        raise refusal(m, "advantages", why)
    if bool((given.abs() > LARGEST).any()):
        raise refusal(m, "advantages", "an advantage is infinite, or beyond what float32 holds.")
    return given[place]


# ---- plans and prompts


def plan(m: Method, value: object, pool_size: int | None, vocabulary: int | None) -> Plan:
    """A plan every row of which can be generated.

    Args:
        pool_size: rows of the dataset, None for a stream.
        vocabulary: number of token ids of the policy, None if that is not known.
    """
    if not isinstance(value, Plan):
        raise refusal(m, "plan", f"{type(value).__name__} instead of a Plan.")
    if not isinstance(value.rows, Sequence) or isinstance(value.rows, str):
        raise refusal(m, "plan", f"`rows` is {type(value.rows).__name__} instead of a tuple of PlanRow.")
    for row in value.rows:
        problem = _row_problem(row, pool_size, vocabulary)
        if problem:
            raise refusal(m, "plan", f"{problem}: {shown(row)}.")
    return value


def _row_problem(row: object, pool_size: int | None, vocabulary: int | None) -> str | None:
    """What is illegal about a plan row."""
    if not isinstance(row, PlanRow):
        return f"{type(row).__name__} instead of a PlanRow"
    if not all(isinstance(v, Integral) for v in (row.prompt_index, row.group, row.n, row.spare)):
        return "`prompt_index`, `group`, `n` and `spare` must be whole numbers"
    if row.n < 0 or row.spare < 0 or len(row.given) > row.n + row.spare:
        return f"{row.n} + {row.spare} rollouts, {len(row.given)} given"
    if row.prompt_index < -1 or (pool_size is not None and row.prompt_index >= pool_size):
        return f"prompt {row.prompt_index} of a dataset of {'unknown' if pool_size is None else pool_size} rows"
    if row.prompt_index == -1 and not row.edit:
        return "a foreign prompt (-1) without columns in `edit`"
    if row.max_tokens is not None and not (isinstance(row.max_tokens, int) and row.max_tokens >= 1):
        return f"max_tokens={shown(row.max_tokens)}, which must be a whole number of at least 1"
    problem = _tokens_problem("`prefix`", row.prefix, vocabulary)
    for completion in row.given:
        problem = problem or _given_problem(completion, vocabulary)
    return problem or _travel_problem(row)


def _given_problem(completion: object, vocabulary: int | None) -> str | None:
    if not isinstance(completion, Completion):
        return f"`given` holds {type(completion).__name__} instead of a Completion"
    if not completion.tokens:
        return "a given completion without tokens"
    if completion.logprobs is not None and len(completion.logprobs) != len(completion.tokens):
        return "a given completion needs as many log-probs as tokens, or None"
    return _tokens_problem("a given completion", completion.tokens, vocabulary)


def _tokens_problem(what: str, tokens: Any, vocabulary: int | None) -> str | None:
    if isinstance(tokens, str) or not isinstance(tokens, Sequence):
        return f"{what} is {type(tokens).__name__}; it must be token ids"
    for token in tokens:
        number = int(token) if isinstance(token, Integral) else -1
        if number < 0 or (vocabulary is not None and number >= vocabulary):
            known = "" if vocabulary is None else f" of 0..{vocabulary - 1}"
            return f"{what} has {shown(token)}, which is no token id{known}"
    return None


def _travel_problem(row: PlanRow) -> str | None:
    """Plans go to other processes."""
    if row.edit is not None and not (isinstance(row.edit, Mapping) and all(isinstance(k, str) for k in row.edit)):
        return "`edit` must map names of columns to values"
    for what, value in (("edit", row.edit), ("payload", row.payload)):
        if value is not None:
            try:
                pickle.dumps(value)
            except Exception as e:
                return f"`{what}` cannot travel to another process ({type(e).__name__}: {e})"
    return None


def prompts(m: Method, value: object, pool: PromptPool, n: int) -> list[int]:
    """`n` different prompts of the pool that the batch does not have yet."""
    try:
        chosen = [operator.index(i) for i in value]  # type: ignore[attr-defined]
    except TypeError:
        why = f"{n} dataset rows (integers) are needed, it gave {shown(value)}."
        raise refusal(m, "select_prompts", why) from None
    if len(chosen) != n or len(set(chosen)) != n or not all(0 <= i < pool.size for i in chosen):
        why = (
            f"{n} different prompts of 0..{pool.size - 1} were asked for, it gave {len(chosen)} "
            f"({len(set(chosen))} different): {chosen[:20]}."
        )
        raise refusal(m, "select_prompts", why)
    again = sorted(set(chosen) & set(pool.taken))
    if again:
        raise refusal(m, "select_prompts", f"the prompts {again[:20]} are in the batch already (`pool.taken`).")
    return chosen


def admission(m: Method, value: object, waiting: int, groups: int) -> Admission:
    """Whole numbers, each of the `waiting` groups named once at most, and at least `groups` of them started."""
    if not isinstance(value, Admission):
        raise refusal(m, "admit", f"{type(value).__name__} instead of an Admission.")
    try:
        fresh = operator.index(value.fresh)
        resume, restart, drop = (
            tuple(operator.index(i) for i in part) for part in (value.resume, value.restart, value.drop)
        )
    except TypeError:
        raise refusal(m, "admit", f"{shown(value)}: whole numbers are needed.") from None
    named = [*resume, *restart, *drop]
    if len(set(named)) != len(named) or not all(0 <= i < waiting for i in named) or fresh < 0:
        why = f"{shown(value)}: each of the {waiting} waiting groups may be named once, and `fresh` is at least 0."
        raise refusal(m, "admit", why)
    started = len(resume) + len(restart) + fresh
    if started < groups:
        raise refusal(m, "admit", f"it starts {started} groups, and the batch trains {groups}.")
    return Admission(fresh, resume, restart, drop)


# ---- the update


def update(m: Method, value: object, n: int) -> Update:
    """A factor that is finite and at least 0, and columns of (n,) float32."""
    if not isinstance(value, Update):
        raise refusal(m, "before_update", f"{type(value).__name__} instead of an Update.")
    if not isinstance(value.columns, Mapping):
        why = f"`columns` is {type(value.columns).__name__}; it maps names to one number per row."
        raise refusal(m, "before_update", why)
    scale = math.nan
    if isinstance(value.lr_scale, Real) or (isinstance(value.lr_scale, Tensor) and value.lr_scale.numel() == 1):
        scale = float(value.lr_scale)
    if not 0 <= scale < math.inf:
        why = (
            f"`lr_scale` is {shown(value.lr_scale)}; it must be a finite number of at least 0 (1: the schedule's "
            f"learning rate)."
        )
        raise refusal(m, "before_update", why)
    columns = {
        str(name): finite(m, "before_update", f"the column `{name}`", given, n, "row").float()
        for name, given in value.columns.items()
    }
    return Update(scale, columns)


def per_token(m: Method, hook: str, value: object, terms: Terms, gradient: bool) -> Tensor:
    """(rows, time), finite wherever a token is trained.

    Args:
        gradient: it must have one where `terms.logprobs` has one.
    """
    shape = tuple(terms.logprobs.shape)
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        why = f"a tensor of shape {shape}, one value per token, is needed; it gave {given}."
        raise refusal(m, hook, why)
    trained = terms.mask > 0
    if gradient and terms.logprobs.requires_grad and not value.requires_grad and bool(trained.any()):
        raise refusal(m, hook, "it has no gradient; it must depend on `terms.logprobs` without `detach`.")
    if not bool(torch.isfinite(torch.where(trained, value.detach(), 0.0)).all()):
        raise refusal(m, hook, "the value of a trained token is NaN or infinite, so the weights would become NaN.")
    return value
