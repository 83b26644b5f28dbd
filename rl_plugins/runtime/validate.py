"""What hooks return, checked in one place for every hook and host: type, shape, length, dtype, finite, gradient.

Every invalid_return names the method and the hook, what came, and what is allowed.
"""

from __future__ import annotations

import itertools
import math
import operator
import pickle
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral, Real
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.errors import MethodError, shortened, shown
from rl_plugins.core.method import Method
from rl_plugins.core.requests import Turn
from rl_plugins.core.rollouts import Admission, Completion, Plan, PlanRow, PromptPool, Rollouts, Terms, Tokens, Update
from rl_plugins.runtime.validate_programs import LARGEST_LOGPROB

# Hosts compute in float32, whose largest number is 3.4e38. Of values up to this one a million squares can be summed.
LARGEST = 1e16
LARGEST_FLOAT32 = float(torch.finfo(torch.float32).max)
LARGEST_LR_SCALE = 1e4
MOST_GENERATED = 1000  # times the rows that are trained
INT64 = 2**63


def invalid_return(m: Method, hook: str, why: str) -> MethodError:
    """An error for an illegal return value."""
    return MethodError(
        f"Method `{m.name}` returned something illegal from `{hook}`: {why} "
        f"Remove `{m.name}` from `methods` to go on without it."
    )


@contextmanager
def invalid_returns(m: Method, hook: str) -> Iterator[None]:
    """Whatever an answer raises when it is looked at is an error of its hook, too."""
    try:
        yield
    except (MethodError, KeyboardInterrupt):
        raise
    except BaseException as e:  # an exit, too
        raise invalid_return(m, hook, f"it cannot be read ({type(e).__name__}: {shortened(e)}).") from e


# ---- numbers


def numbers(m: Method, hook: str, what: str, value: object, n: int, kind: str, source: str = "") -> Tensor:
    """(n,) on the CPU, without gradient.

    Args:
        what: how messages call a field of the answer: "`keep_rows`"; empty: it is the whole answer.
        kind: what there must be one of per entry: "row".
        source: who says so, for the message.
    """
    try:
        given = torch.as_tensor(value, device="cpu").detach()
    except Exception as e:
        why = f"must be a tensor (or numbers that make one), it gave {type(value).__name__}: {shortened(e)}."
        raise invalid_return(m, hook, f"{what or 'the answer'} {why}") from None
    if given.layout != torch.strided:
        raise invalid_return(m, hook, f"{what or 'the answer'} must be a dense tensor, it gave {given.layout}.")
    if given.shape != (n,):
        shape = tuple(given.shape)
        asked = f"{what} needs one entry per {kind} ({n}), it has {shape}."
        raise invalid_return(
            m, hook, asked if what else f"one number per {kind} ({n}) is needed{source}; it gave {shape}."
        )
    if given.is_complex():
        raise invalid_return(m, hook, f"{what or 'the answer'} has complex numbers.")
    return given


def mask(m: Method, hook: str, what: str, value: object, n: int, kind: str) -> Tensor:
    """(n,) bool."""
    given = numbers(m, hook, what, value, n, kind)
    if given.dtype != torch.bool:
        raise invalid_return(m, hook, f"{what or 'the mask'} must be a bool tensor, it gave {given.dtype}.")
    return given


def finite(m: Method, hook: str, what: str, value: object, n: int, kind: str) -> Tensor:
    """(n,) without NaN, infinity, and what is infinite in float32."""
    given = numbers(m, hook, what, value, n, kind)
    if not _within(given, LARGEST_FLOAT32):
        raise invalid_return(m, hook, f"{what} has values that are not finite, or beyond what float32 holds.")
    return given


def _within(values: Tensor, largest: float) -> bool:
    """Whether every number is one, and not beyond that; NaN is the smallest and the largest of numbers with a NaN."""
    return not len(values) or all(abs(end.item()) <= largest for end in torch.aminmax(values))


# ---- prompts of a teacher


def teacher_prompts(m: Method, value: object, n: int) -> list[str | list[dict[str, Any]] | None]:
    """A prompt per row, (n,): a text, messages, or None."""
    hook, found = "teacher_prompts", list[Any]()
    if not isinstance(value, (list, tuple)) or len(value) != n:
        what = f"{len(value)} entries" if isinstance(value, (list, tuple)) else f"{type(value).__name__}"
        raise invalid_return(m, hook, f"one prompt per row ({n}) is needed, in a list; it gave {what}.")
    for given in value:
        if given is not None and not (isinstance(given, str) and given):
            good = isinstance(given, (list, tuple)) and given and all(isinstance(x, Mapping) for x in given)
            if not good or not all(isinstance(x.get("role"), str) and "content" in x for x in given):
                why = f"it gave {shown(given)}; a prompt is a text, messages with `role` and `content`, or None."
                raise invalid_return(m, hook, why)
            given = [dict(message) for message in given]
        found.append(given)
    return found


# ---- rewards and advantages


def bounded(m: Method, hook: str, what: str, value: object, n: int, kind: str) -> Tensor:
    """(n,) float64, without NaN, infinity, and what is too large for statistics in float32."""
    given = numbers(m, hook, what, value, n, kind).double()
    if not _within(given, LARGEST):
        raise invalid_return(m, hook, f"{what} has values that are not finite, or beyond {LARGEST:g}.")
    return given


def columns(m: Method, hook: str, what: str, value: object, n: int, kind: str) -> dict[str, Tensor]:
    """Names to (n,) each, that are finite in float32."""
    if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
        raise invalid_return(m, hook, f"{what} is {type(value).__name__}; it maps names to one number per {kind}.")
    return {name: finite(m, hook, f"the column `{name}`", given, n, kind) for name, given in value.items()}


def rewards(m: Method, value: object, rollouts: Rollouts) -> Tensor:
    """(rows,) float64; NaN withdraws a row. At least one row keeps a reward if one had one."""
    reward = numbers(m, "rewards", "", value, len(rollouts), "row").double()
    new = too_large(reward) & ~too_large(rollouts.reward)  # those it was given are not its own
    if bool(new.any()):
        why = f"a reward is infinite, or beyond {LARGEST:g}; NaN is what a row without a reward gets."
        raise invalid_return(m, "rewards", why)
    had = ~torch.isnan(rollouts.reward)
    if bool(had.any()) and bool(torch.isnan(reward).all()):
        why = (
            f"every reward is NaN, though {int(had.sum())} of {len(rollouts)} rows had one. NaN withdraws a row; "
            f"return None to leave all rewards as they are."
        )
        raise invalid_return(m, "rewards", why)
    return reward


def too_large(values: Tensor) -> Tensor:
    """Which numbers are infinite, or so large that statistics of them are in float32. Not NaN."""
    return values.abs() > LARGEST


def turns_known(m: Method, rollouts: Rollouts, tokens: Tokens | None) -> None:
    """Refuses a batch that does not say what its turns are, if `m` makes one advantage per turn."""
    if m.advantages_per == "turn" and (rollouts.turns is None or tokens is None or tokens.turn is None):
        raise MethodError(
            f"Method `{m.name}` makes one advantage per turn, and this batch does not say what its turns are "
            f"({'rollouts.turns' if rollouts.turns is None else 'tokens.turn'} is None). Hosts tell that to "
            f'methods with "turns" in `needs`; a method without turns has advantages_per = "row".'
        )


def advantages(m: Method, value: object, rollouts: Rollouts) -> Tensor:
    """(rows,) or (turns,) float64, as `m.advantages_per` says; 0 where the row has no reward, and never NaN."""
    reward = rollouts.reward
    if m.advantages_per == "turn":
        assert rollouts.turns is not None  # see `turns_known`
        reward = reward[rollouts.turns.row]
    source = f', as the class says with advantages_per = "{m.advantages_per}"'
    given = numbers(m, "advantages", "", value, len(reward), m.advantages_per, source).double()
    scored = ~torch.isnan(reward)
    if bool((torch.isnan(given) & scored).any()):
        why = (
            "an advantage is NaN, and its row has a reward. Rows without a reward stay out of every statistic (those "
            "of `rollouts.groups` leave them out); where there is nothing to compare with, the advantage is 0."
        )
        raise invalid_return(m, "advantages", why)
    if bool(too_large(given).any()):
        why = (
            f"an advantage is infinite, or beyond {LARGEST:g}: its square is infinite in float32. Look at the rewards."
        )
        raise invalid_return(m, "advantages", why)
    return torch.where(scored, given, 0.0)


# ---- plans and prompts


def plan(m: Method, value: object, asked: Plan, pool_size: int | None, vocabulary: int | None) -> Plan:
    """A plan whose rows can all be generated.

    Args:
        asked: what the hook was given.
        pool_size: rows of the dataset, None for a stream.
        vocabulary: number of token ids of the policy, None if that is not known.
    """
    if not isinstance(value, Plan):
        raise invalid_return(m, "plan", f"{type(value).__name__} instead of a Plan.")
    if (value.group_size, value.budget, value.round) != (asked.group_size, asked.budget, asked.round):
        raise invalid_return(m, "plan", "it changed `group_size`, `budget` or `round`, which are the host's.")
    if not isinstance(value.rows, Sequence) or isinstance(value.rows, str):
        raise invalid_return(m, "plan", f"`rows` is {type(value.rows).__name__} instead of a tuple of PlanRow.")
    for row in value.rows:
        problem = _row_problem(row, pool_size, vocabulary)
        if problem:
            raise invalid_return(m, "plan", f"{problem}: {shown(row)}.")
    most = MOST_GENERATED * max(asked.budget, asked.trained, asked.group_size)
    begun = value.generated + sum(row.redundant for row in value.rows)
    if begun > most or len(value.rows) > most:
        why = f"{begun} rollouts in {len(value.rows)} rows, and the batch trains {asked.budget}"
        raise invalid_return(m, "plan", f"{why}; at most {MOST_GENERATED} times as many can be generated.")
    for field, signal in (("redundant", "redundancy"), ("max_turns", "turn_limits")):
        new = {getattr(row, field) for row in value.rows} - {getattr(row, field) for row in asked.rows} - {0, None}
        if new and signal not in m.needs:
            why = (
                f'`{field}` is {min(new)}. Add "{signal}" to the `needs` of the class: a run where nothing comes of it'
            )
            raise invalid_return(m, "plan", f"{why} is refused then.")
    return value


def _row_problem(row: object, pool_size: int | None, vocabulary: int | None) -> str | None:
    """What is illegal about a plan row."""
    if not isinstance(row, PlanRow):
        return f"{type(row).__name__} instead of a PlanRow"
    if not all(map(_is_whole, (row.prompt_index, row.group, row.n, row.spare, row.redundant))):
        return "`prompt_index`, `group`, `n`, `spare` and `redundant` must be whole numbers"
    if not -INT64 <= row.group < INT64 or row.prompt_index >= INT64:
        return "a number beyond 64 bits in `group` or `prompt_index`"
    if not _is_list(row.given):
        return f"`given` is {type(row.given).__name__} instead of a tuple of Completion"
    if row.n < 0 or row.spare < 0 or len(row.given) > row.n + row.spare:
        return f"{row.n} + {row.spare} rollouts, {len(row.given)} given"
    if row.redundant < 0:
        return f"{row.redundant} redundant rollouts"
    if row.prompt_index < -1 or (pool_size is not None and row.prompt_index >= pool_size):
        return f"prompt {row.prompt_index} of a dataset of {'unknown' if pool_size is None else pool_size} rows"
    if row.prompt_index == -1 and not row.edit:
        return "a foreign prompt (-1) without columns in `edit`"
    if row.max_tokens is not None and not (isinstance(row.max_tokens, Integral) and row.max_tokens >= 1):
        return f"max_tokens={shown(row.max_tokens)}, which must be a whole number of at least 1"
    if row.max_turns is not None and not (isinstance(row.max_turns, Integral) and row.max_turns >= 1):
        return f"max_turns={shown(row.max_turns)}, which must be a whole number of at least 1"
    problem = _tokens_problem("`prefix`", row.prefix, vocabulary)
    for completion in row.given:
        problem = problem or _given_problem(completion, vocabulary)
    problem = problem or _travel_problem(row)
    for name in ("prompt", "raw_prompt"):  # verl has both
        problem = problem or _messages_problem((row.edit or {}).get(name, "-"), vocabulary is not None)
    return problem


def _is_whole(value: object) -> bool:
    return type(value) is int or isinstance(value, Integral)  # the abstract class alone takes ten times as long


def _is_list(value: object) -> bool:
    return type(value) is tuple or (isinstance(value, Sequence) and not isinstance(value, str))


def _given_problem(completion: object, vocabulary: int | None) -> str | None:
    if not isinstance(completion, Completion):
        return f"`given` holds {type(completion).__name__} instead of a Completion"
    if not completion.tokens:
        return "a given completion without tokens"
    if completion.logprobs is not None:
        if len(completion.logprobs) != len(completion.tokens):
            return "a given completion needs as many log-probs as tokens, or None"
        read = completion.observed or itertools.repeat(False)  # log-probs of tokens that were only read say nothing
        if not _all_within(completion.logprobs, "f", -math.inf, LARGEST_LOGPROB) and not all(
            isinstance(p, Real) and (seen is True or -math.inf < p <= LARGEST_LOGPROB)
            for p, seen in zip(completion.logprobs, read, strict=False)
        ):
            return "a log-prob of a given completion must be a finite number of at most 0"
    for name in ("versions", "observed"):
        values = getattr(completion, name)
        if values is not None and (not isinstance(values, Sequence) or len(values) != len(completion.tokens)):
            return f"a given completion needs as many `{name}` as tokens, or None"
    versions = completion.versions or ()
    if not _all_within(versions, "iu", -1, INT64 - 1) and not all(
        isinstance(v, Integral) and 0 <= v < INT64 for v in versions
    ):
        return "`versions` of a given completion must be whole numbers of at least 0"
    if completion.observed is not None:
        if not all(isinstance(x, bool) for x in completion.observed):
            return "`observed` of a given completion must be True or False for each token"
        if all(completion.observed):
            return "every token of a given completion was only read, so none is trained"
    if completion.rewards is not None and not (
        isinstance(completion.rewards, Mapping)
        and all(
            isinstance(k, str) and isinstance(v, Real) and abs(v) != math.inf for k, v in completion.rewards.items()
        )
    ):
        return "`rewards` of a given completion must be finite numbers, or NaN, by name of the reward function"
    problem = _turns_problem(completion)
    if completion.prompt is not None:
        problem = problem or ("" if completion.prompt else "a given completion with an empty `prompt`")
        problem = problem or _tokens_problem("the `prompt` of a given completion", completion.prompt, vocabulary)
    return problem or _tokens_problem("a given completion", completion.tokens, vocabulary)


def _turns_problem(completion: Completion) -> str | None:
    """Turns follow each other and lie inside of the completion."""
    if not isinstance(completion.turns, Sequence) or not all(isinstance(t, Turn) for t in completion.turns):
        return "`turns` of a given completion must be a tuple of Turn"
    bounds = [0, *(x for t in completion.turns for x in (t.start, t.stop)), len(completion.tokens)]
    if not all(isinstance(x, Integral) for x in bounds) or any(b < a for a, b in itertools.pairwise(bounds)):
        return f"`turns` of a given completion must be in order and within its {len(completion.tokens)} tokens"
    return None


def _tokens_problem(what: str, tokens: Any, vocabulary: int | None) -> str | None:
    if not _is_list(tokens):
        return f"{what} is {type(tokens).__name__}; it must be token ids"
    if not len(tokens) or _all_within(tokens, "iu", -1, INT64 if vocabulary is None else vocabulary - 1):
        return None
    for token in tokens:
        number = int(token) if isinstance(token, Integral) else -1
        if number < 0 or (vocabulary is not None and number >= vocabulary):
            known = "" if vocabulary is None else f" of 0..{vocabulary - 1}"
            return f"{what} has {shown(token)}, which is no token id{known}"
    return None


def _all_within(values: Sequence[Any], kinds: str, above: float, most: float) -> bool:
    """Whether all are numbers of one of numpy's kinds, above the one bound and at most the other; False also where
    that takes a closer look. A replayed batch has millions of tokens, and one by one they take seconds."""
    try:
        array = np.asarray(values)
    except Exception:
        return False
    return not array.size or (array.dtype.kind in kinds and array.min() > above and bool(array.max() <= most))


def _travel_problem(row: PlanRow) -> str | None:
    """Plans go to other processes."""
    if row.edit is not None and not (isinstance(row.edit, Mapping) and all(isinstance(k, str) for k in row.edit)):
        return "`edit` must map names of columns to values"
    for what, value in (("edit", row.edit), ("payload", row.payload)):
        if value is not None:
            try:
                pickle.dumps(value)
            except Exception as e:
                return f"`{what}` cannot travel to another process ({type(e).__name__}: {shortened(e)})"
    return None


def _messages_problem(prompt: Any, of_tokens: bool) -> str | None:
    """What no chat template takes. The prompts of a diffusion policy may be anything."""
    many = isinstance(prompt, (list, tuple, np.ndarray)) and len(prompt) > 0
    if of_tokens and not many and not isinstance(prompt, str):
        return f"`edit` has the prompt {shown(prompt)}; a prompt is a text or a list of messages"
    for message in prompt if many and (of_tokens or isinstance(prompt[0], Mapping)) else ():
        if not (isinstance(message, Mapping) and isinstance(message.get("role"), str) and message["role"]):
            return f"`edit` has a prompt with {shown(message)}, which is no message with a `role`"
    return None


def prompts(m: Method, value: object, pool: PromptPool, n: int) -> list[int]:
    """`n` different prompts of the pool that the batch does not have yet."""
    try:
        chosen = [operator.index(i) for i in itertools.islice(value, n + pool.size)]  # type: ignore[call-overload]
    except TypeError:
        why = f"{n} dataset rows (integers) are needed, it gave {shown(value)}."
        raise invalid_return(m, "select_prompts", why) from None
    if len(chosen) != n or len(set(chosen)) != n or not all(0 <= i < pool.size for i in chosen):
        why = (
            f"{n} different prompts of 0..{pool.size - 1} were asked for, it gave {len(chosen)} "
            f"({len(set(chosen))} different): {shown(chosen[:20])}."
        )
        raise invalid_return(m, "select_prompts", why)
    again = sorted(set(chosen) & set(pool.taken))
    if again:
        raise invalid_return(m, "select_prompts", f"the prompts {again[:20]} are in the batch already (`pool.taken`).")
    return chosen


def admission(m: Method, value: object, waiting: int, groups: int) -> Admission:
    """Whole numbers, each of the `waiting` groups named once at most, and at least `groups` of them started."""
    if not isinstance(value, Admission):
        raise invalid_return(m, "admit", f"{type(value).__name__} instead of an Admission.")
    try:
        fresh = operator.index(value.fresh)
        resume, restart, drop = (
            tuple(operator.index(i) for i in part) for part in (value.resume, value.restart, value.drop)
        )
    except TypeError:
        raise invalid_return(m, "admit", f"{shown(value)}: whole numbers are needed.") from None
    named = [*resume, *restart, *drop]
    if len(set(named)) != len(named) or not all(0 <= i < waiting for i in named) or fresh < 0:
        why = f"{shown(value)}: each of the {waiting} waiting groups may be named once, and `fresh` is at least 0."
        raise invalid_return(m, "admit", why)
    started = len(resume) + len(restart) + fresh
    if started > MOST_GENERATED * groups:
        why = (
            f"it starts {started} groups, and the batch trains {groups}; at most {MOST_GENERATED} times as many may be."
        )
        raise invalid_return(m, "admit", why)
    if started < groups:
        raise invalid_return(m, "admit", f"it starts {started} groups, and the batch trains {groups}.")
    return Admission(fresh, resume, restart, drop)


# ---- the update


def update(m: Method, value: object, n: int) -> Update:
    """A factor that is finite and at least 0, and columns of (n,) float32."""
    if not isinstance(value, Update):
        raise invalid_return(m, "before_update", f"{type(value).__name__} instead of an Update.")
    scale = math.nan
    if isinstance(value.lr_scale, Real) or (isinstance(value.lr_scale, Tensor) and value.lr_scale.numel() == 1):
        scale = float(value.lr_scale)
    if not 0 <= scale <= LARGEST_LR_SCALE:
        why = (
            f"`lr_scale` is {shown(value.lr_scale)}; it must be a finite number of at least 0 and at most "
            f"{LARGEST_LR_SCALE:g} (1: the schedule's learning rate)."
        )
        raise invalid_return(m, "before_update", why)
    given = columns(m, "before_update", "`columns`", value.columns, n, "row")
    return Update(scale, {name: values.float() for name, values in given.items()})


def per_token(m: Method, hook: str, value: object, terms: Terms, gradient: bool) -> Tensor:
    """(rows, time), finite wherever a token is trained.

    Args:
        gradient: it must have one where `terms.logprobs` has one; otherwise only if it is not 0 everywhere.
    """
    shape = tuple(terms.logprobs.shape)
    if not isinstance(value, Tensor) or tuple(value.shape) != shape:
        given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        why = f"a tensor of shape {shape}, one value per token, is needed; it gave {given}."
        raise invalid_return(m, hook, why)
    if not value.is_floating_point() or value.device != terms.logprobs.device or value.layout != torch.strided:
        what = f"{value.dtype}, {value.layout}, on {value.device}"
        raise invalid_return(
            m, hook, f"a dense tensor of real numbers on {terms.logprobs.device} is needed; it gave {what}."
        )
    trained = terms.mask > 0
    masked = torch.where(trained, value, 0.0)
    live = [x for x in (terms.logprobs, terms.entropies) if x is not None and x.requires_grad]
    grads: Sequence[Tensor | None] = [None]
    if live and value.requires_grad:  # of what the method made of the log-probs, not of the model
        grads = torch.autograd.grad(masked.sum(), live, retain_graph=True, allow_unused=True)
    flags = [torch.isfinite(masked.detach()).all(), (trained if gradient else masked).any()]
    finite, acts, *finite_grads = read(flags + [torch.isfinite(g).all() for g in grads if g is not None])
    if not finite:
        raise invalid_return(
            m, hook, "the value of a trained token is NaN or infinite, so the weights would become NaN."
        )
    missing = grads[0] is None if gradient else all(g is None for g in grads)
    if live and missing and acts:
        on = "`terms.logprobs`" if gradient else "`terms.logprobs` or `terms.entropies`"
        raise invalid_return(m, hook, f"it has no gradient; it must depend on {on} without `detach`.")
    if not all(finite_grads):
        why = (
            "its gradient is NaN or infinite, so the weights would become NaN. Look for a root, a logarithm or a "
            "division at 0, at masked tokens too: torch.where has a NaN gradient where the value it does not take is "
            "infinite."
        )
        raise invalid_return(m, hook, why)
    return value


def read(flags: Sequence[Tensor]) -> list[bool]:
    """Answers that lie on a device, at once: each time the host asks, it waits for all that the device has to do."""
    return [bool(answer) for answer in torch.stack(list(flags)).tolist()]
