"""What becomes of a generated batch: rewards, selection, advantages, shaping, observation.

An adapter gathers its rows, calls `decide` (or its halves, `select_rows` and `decide_advantages`) and applies the
`Decision`. Nothing here knows a host, so both hosts decide alike on the same rollouts.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch import Tensor

from rl_plugins.core.errors import MethodError
from rl_plugins.core.groups import Groups, count_true, spread
from rl_plugins.core.method import Method
from rl_plugins.core.rollouts import Rollouts, Shape, Tokens
from rl_plugins.runtime import validate
from rl_plugins.runtime.stack import MethodStack
from rl_plugins.runtime.validate_programs import LARGEST_LOGPROB

logger = logging.getLogger("rl_plugins")

Estimator = Callable[[Rollouts], Tensor]
_TAKERS = ("plan", "admit", "rollout", "select", "shape")  # hooks that can leave a batch with fewer rows


@dataclass(frozen=True)
class Decision:
    """What becomes of every generated row and token, in the order they were given.

    Attributes:
        rollouts: with the rewards that were used and `kept` as `select` left it.
        stays: (rows,) bool, False for rows a method took out. A row the host itself masked (no tokens) stays: it is
            the host's, which may count it in a mean over rows.
        trained: (rows,) bool, rows that stay and have a token in the update.
        keep_tokens: (tokens,) bool, tokens that stay in the update; None: those of every trained row.
        advantages: (tokens,) float64; 0 for tokens that left; None: every token has that of its row.
        row_advantages: (rows,) float64, mean over the row's tokens; 0 for rows that are not trained.
        uniform: every row's tokens have one advantage.
        old_logprobs: (tokens,) or None.
        row_columns, token_columns: for the loss.
        rewarded_by: methods whose `rewards` hook changed the reward, in order -> (rows,) what each made of it.
        estimator: who made the advantages: a method's name, "host" or "rl_plugins".
    """

    rollouts: Rollouts
    stays: Tensor
    trained: Tensor
    keep_tokens: Tensor | None
    advantages: Tensor | None
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
        skipped: no completion has a reward, so no row stays, and no further hook sees the batch.
    """

    rollouts: Rollouts
    rewarded_by: dict[str, Tensor]
    skipped: bool = False


def decide(
    stack: MethodStack,
    rollouts: Rollouts,
    tokens: Tokens | None,
    host_advantages: Tensor | None,
    estimator: Estimator,
    budget: int,
    selection: Selection | None = None,
) -> Decision:
    """Rewards, selection, advantages, shaping and observation, in this order, for a host that has everything at once.

    Args:
        rollouts: all generated rows; fillers of the host must not be among them.
        tokens: theirs, row by row; None, if the stack does not read them (`MethodStack.reads_tokens`).
        host_advantages: (rows,) the host's own, valid if nothing changed groups or rewards; else None.
        estimator: ours, equal to the host's on equal groups, for when the host's numbers mean nothing.
        budget: rows the host's batch holds.
        selection: of these rollouts, where `select_rows` was called already (for `teacher_prompts`).

    Raises:
        MethodError: see `select_rows` and `decide_advantages`.
    """
    selection = selection or select_rows(stack, rollouts)
    unchanged = bool(selection.rollouts.kept.all()) and not selection.rewarded_by
    theirs = host_advantages if unchanged else None
    return decide_advantages(stack, selection, tokens, theirs, estimator, budget, host_by_rows=True)


def select_rows(stack: MethodStack, rollouts: Rollouts) -> Selection:
    """`rewards` and `select`: what needs no token, so that a host can leave rows out before it computes log-probs.

    Raises:
        MethodError: from a hook, for an illegal return value, for infinite rewards of rows or turns, when a rollout
            program made no row at all, or when no row has a reward, and more batches in a row had none than
            `stack.max_unrewarded_batches`.
    """
    check_made(stack, len(rollouts))
    rewarded_by: dict[str, Tensor] = {}
    for m in stack.claims["rewards"]:
        new = stack.call("rewards", m, rollouts)
        if new is not None:
            with validate.invalid_returns(m, "rewards"):
                reward = validate.rewards(m, new, rollouts)
            rollouts = rollouts.replace(reward=reward)
            rewarded_by[m.name] = reward
    if bool(validate.too_large(rollouts.reward).any()):
        columns = zip(rollouts.reward_names, rollouts.rewards.unbind(1), strict=True)
        names = ", ".join(name for name, column in columns if bool(validate.too_large(column).any()))
        raise MethodError(
            f"A reward is infinite ({names or 'their weighted sum'}), or beyond {validate.LARGEST:g}, so that sums of "
            f"squares are infinite in float32; rewards must be finite numbers within that, or None/NaN where a row "
            f"has none."
        )
    turns = rollouts.turns
    if turns is not None and bool((bad := validate.too_large(turns.reward)).any()):
        raise MethodError(
            f"The reward of {int(bad.sum())} of {len(bad)} turns is infinite, or beyond {validate.LARGEST:g}, first "
            f"that of turn {int(turns.turn[bad][0])} of row {int(turns.row[bad][0])}; rewards of turns must be finite "
            f"numbers within that, or NaN where a turn has none. Look at what the environment gives."
        )
    if len(rollouts) and bool(torch.isnan(rollouts.reward).all()):
        _count_unrewarded(stack, rollouts)
        return Selection(rollouts.replace(kept=torch.zeros(len(rollouts), dtype=torch.bool)), rewarded_by, skipped=True)
    stack.unrewarded_in_a_row = 0
    keep = rollouts.kept
    for m in stack.claims["select"]:
        stays = stack.call("select", m, rollouts.replace(kept=keep))
        if stays is not None:
            with validate.invalid_returns(m, "select"):
                keep = keep & validate.mask(m, "select", "", stays, len(rollouts), "row")
    return Selection(rollouts.replace(kept=keep), rewarded_by)


def teacher_prompts(stack: MethodStack, selection: Selection) -> list[Any] | None:
    """Of every row, the prompt under which the teacher reads its completion, a text or messages; None: it does not, as
    in rows that left. None instead of the list: each under its own prompt.

    Raises:
        MethodError: from the hook, or for an illegal return value.
    """
    if not stack.claims["teacher_prompts"]:
        return None
    m, kept = stack.claims["teacher_prompts"][0], selection.rollouts.kept
    if not bool(kept.any()):
        return [None] * len(kept)
    inside = selection.rollouts.subset(kept)
    answer = stack.call("teacher_prompts", m, inside)
    with validate.invalid_returns(m, "teacher_prompts"):
        given = iter(validate.teacher_prompts(m, answer, len(inside)))
    return [next(given) if stays else None for stays in kept.tolist()]


def check_made(stack: MethodStack, rows: int) -> None:
    """Refuses a batch for which a rollout program returned nothing.

    Args:
        rows: of the batch.
    """
    if not rows and stack.claims["rollout"]:
        m = stack.claims["rollout"][0]
        why = "no rollout for any prompt of the batch. It may leave out some prompts, not all of them."
        raise validate.invalid_return(m, "rollout", why)


def _count_unrewarded(stack: MethodStack, rollouts: Rollouts) -> None:
    """A batch without a reward is skipped, with a warning, or ends the run."""
    in_a_row, most = stack.unrewarded_in_a_row + 1, stack.max_unrewarded_batches
    what = (
        f"Not one of the {len(rollouts)} completions has a reward: every reward function "
        f"({', '.join(rollouts.reward_names)}) returned None or NaN for all of them."
    )
    if in_a_row > most:
        before = f" So it was in the {most} batches before (max_unrewarded_batches={most})." if most else ""
        raise MethodError(
            f"{what}{before} Nothing can be learned from this batch. Check the reward functions, the services they "
            f"ask and the columns they read, and resume; max_unrewarded_batches says how many such batches in a row "
            f"are skipped."
        )
    stack.unrewarded, stack.unrewarded_in_a_row = stack.unrewarded + 1, in_a_row
    logger.warning(
        "%s Nothing is trained on this batch. It is number %d in a row, and at most %d are skipped "
        "(max_unrewarded_batches).",
        what,
        in_a_row,
        most,
    )


def decide_advantages(
    stack: MethodStack,
    selection: Selection,
    tokens: Tokens | None,
    host_advantages: Tensor | Literal["unread"] | None,
    estimator: Estimator,
    budget: int,
    host_by_rows: bool = False,
) -> Decision:
    """Advantages, shaping and observation of what `select` left.

    Args:
        tokens: of all rows, or of those that `select` left, row by row; `row` points into all rows. None, if the stack
            does not read them: the decision is then made and told per row, and equal to the one made with them.
        host_advantages: the host's own, (tokens,), or (rows,) without tokens or with `host_by_rows`; "unread": they
            stand where they are, and are those of `estimator`; None: they mean nothing for these rows.
        estimator, budget: as in `decide`.

    Raises:
        MethodError: from a hook, for an illegal return value, or when more rows stay than the batch holds.
    """
    rollouts = selection.rollouts
    if stack.unrewarded:
        stack.metrics.add("rl_plugins/unrewarded_batches", stack.unrewarded, "max")
    keep = rollouts.kept
    inside = rollouts.subset(keep)  # what left is out of every statistic
    places = None if tokens is None else _Places.of(tokens, rollouts)
    within = None if places is None else places.within()
    if isinstance(host_advantages, Tensor):
        host_advantages = host_advantages[keep] if places is None or host_by_rows else places.inside(host_advantages)
    claims = dict[str, list[Method]]() if selection.skipped else stack.claims
    source, values, by_rows = _advantages(stack, claims, inside, within, host_advantages, estimator, host_by_rows)
    keep_rows = torch.ones(len(inside), dtype=torch.bool)
    shaping = _Shaping(inside, within, values if by_rows else None, keep_rows, of_tokens=stack.vocabulary is not None)
    if within is not None:
        shaping.tokens = within.replace(advantages=shaping.spread(values) if by_rows else values)
    for m in claims.get("shape", ()):
        shaped = stack.call("shape", m, inside, _seen_by(m, shaping.tokens))
        if shaped is not None:
            with validate.invalid_returns(m, "shape"):
                shaping.apply(m, shaped)
    for m in claims.get("observe", ()):
        seen = shaping.tokens
        if seen is not None and places is not None:
            seen = places.everywhere(seen)
        stack.call("observe", m, rollouts, _seen_by(m, seen), dict(stack.stats))
    stack.batch, stack.draw = stack.batch + 1, 0
    stays = shaping.stays  # of all hooks
    _check_rows(stays, inside, budget)
    if len(rollouts) and not selection.skipped and not bool(stays.any()):
        names = dict.fromkeys(f"`{m.name}`" for m in [*stack.claims["select"], *stack.claims["shape"]])
        stack.warn_once(
            f"Every row of a batch left ({', '.join(names)}): nothing is trained on it, and the weights rest. The "
            f"metric rl_plugins/rows_trained is 0 for such batches."
        )
    if shaping.tokens is None or places is None:
        return _decision_by_rows(selection, shaping, source)
    return _decision_by_tokens(selection, shaping, shaping.tokens, places, source)


@dataclass(frozen=True)
class _Places:
    """Tokens of the rows that `select` left, among all that were given.

    Attributes:
        tokens: all that were given.
        rollouts: all rows.
        stay: (tokens,) bool; None: all of them stay.
    """

    tokens: Tokens
    rollouts: Rollouts
    stay: Tensor | None

    @classmethod
    def of(cls, tokens: Tokens, rollouts: Rollouts) -> _Places:
        if bool(rollouts.kept.all()):
            return cls(tokens, rollouts, None)
        stay = rollouts.kept[tokens.row]
        return cls(tokens, rollouts, None if bool(stay.all()) else stay)

    def inside(self, values: Tensor) -> Tensor:
        return values if self.stay is None else values[self.stay]

    def back(self, values: Tensor) -> Tensor:
        """0 for tokens that left."""
        return values if self.stay is None else _back(values, self.stay)

    def within(self) -> Tokens:
        """Those tokens, pointing at the rows and turns that stayed."""
        keep = self.rollouts.kept
        if bool(keep.all()):
            return self.tokens
        row = self.inside(self.tokens.row)
        within = self.tokens if self.stay is None else self.tokens.subset(self.stay)
        within = within.replace(row=_renumbered(keep)[row])
        if self.rollouts.turns is not None and within.turn is not None:
            within = within.replace(turn=_renumbered(keep[self.rollouts.turns.row])[within.turn])
        return within

    def everywhere(self, within: Tokens) -> Tokens:
        """Those tokens, pointing at all rows and turns again."""
        turn = None if self.tokens.turn is None else self.inside(self.tokens.turn)
        return within.replace(row=self.inside(self.tokens.row), turn=turn)


def _advantages(
    stack: MethodStack,
    claims: Mapping[str, list[Method]],
    inside: Rollouts,
    within: Tokens | None,
    host: Tensor | Literal["unread"] | None,
    estimator: Estimator,
    host_by_rows: bool,
) -> tuple[str, Tensor, bool]:
    """Who made the advantages; (rows,), or (tokens,) where those of a row may differ, 0 where a row has no reward; and
    whether they are by rows."""
    scored = ~torch.isnan(inside.reward)
    if claims.get("advantages"):
        m = claims["advantages"][0]
        validate.turns_known(m, inside, within)
        made = stack.one("advantages", inside)
        with validate.invalid_returns(m, "advantages"):
            values = validate.advantages(m, made, inside)
        if within is not None and within.turn is not None and m.advantages_per == "turn":
            return m.name, values[within.turn], False
        return m.name, values, True
    if isinstance(host, Tensor):
        if within is None or host_by_rows:
            return "host", _zero_unless(scored, host.double()), True
        return "host", _zero_unless(scored, host.double(), within.row), False
    return "rl_plugins" if host is None else "host", _zero_unless(scored, estimator(inside)), True


def _zero_unless(scored: Tensor, values: Tensor, row: Tensor | None = None) -> Tensor:
    """Advantages, 0 where a row has no reward; a host's NaN is an advantage it could not make.

    Args:
        scored: (rows,) bool. values: (rows,), or (tokens,) with the `row` of each.
    """
    missing = torch.isnan(values)
    if not bool(scored.all()):
        missing |= ~scored if row is None else ~scored[row]
    return values.masked_fill(missing, 0.0) if bool(missing.any()) else values


class _Unasked:
    """Stands in a hook for the tokens its method did not ask for; the trace may see them."""

    def __init__(self, method: str, tokens: Tokens | None) -> None:
        self._method, self.hidden = method, tokens

    def _refuse(self) -> NoReturn:
        raise MethodError(
            f'`{self._method}` reads `tokens`, and does not ask for them. Add "tokens" to its `needs`; without it the '
            f"tokens of a batch are not gathered."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # copy and pickle ask for some
            raise AttributeError(name)
        self._refuse()

    def __len__(self) -> int:
        self._refuse()


def _seen_by(m: Method, tokens: Tokens | None) -> Any:
    """The tokens for a method that asks for them."""
    return tokens if "tokens" in m.needs and tokens is not None else _Unasked(m.name, tokens)


@dataclass
class _Shaping:
    """What the `shape` hooks made so far of the rows that `select` left.

    Attributes:
        rollouts: those rows.
        tokens: with the advantages, `keep` and old log-probs to use; None where nobody reads them.
        row_advantages: (rows,) of all tokens of each row; None where they may differ.
        keep_rows: (rows,) bool.
        row_columns, token_columns: for the loss.
        new_old_logprobs: some hook gave old log-probs.
        of_tokens: the policy has a vocabulary; densities of a diffusion policy may be above 1.
    """

    rollouts: Rollouts
    tokens: Tokens | None
    row_advantages: Tensor | None
    keep_rows: Tensor
    row_columns: dict[str, Tensor] = field(default_factory=dict)
    token_columns: dict[str, Tensor] = field(default_factory=dict)
    new_old_logprobs: bool = False
    of_tokens: bool = True

    def apply(self, m: Method, shaped: Any) -> None:
        """Takes over what one hook returned.

        Raises:
            MethodError: it is illegal.
        """
        if not isinstance(shaped, Shape):
            raise validate.invalid_return(m, "shape", f"{type(shaped).__name__} instead of a Shape.")
        rows, keep_rows = len(self.rollouts), None
        if shaped.keep_rows is not None:
            keep_rows = validate.mask(m, "shape", "`keep_rows`", shaped.keep_rows, rows, "row")
            self.keep_rows = self.keep_rows & keep_rows
        self._add(m, self.row_columns, shaped.row_columns, rows, "row")
        per_token = (shaped.advantages, shaped.old_logprobs, shaped.keep_tokens)
        gives = any(x is not None for x in per_token) or bool(shaped.token_columns)
        if gives and (self.tokens is None or "tokens" not in m.needs):
            why = 'it gave values per token, and the class does not ask for tokens. Add "tokens" to its `needs`.'
            raise validate.invalid_return(m, "shape", why)
        factor = shaped.row_factor
        if factor is not None:
            factor = validate.bounded(m, "shape", "`row_factor`", factor, rows, "row")
        if self.tokens is not None:
            self._apply_to_tokens(m, shaped, self.tokens, keep_rows, factor)
        elif factor is not None and self.row_advantages is not None:
            made = self.row_advantages * factor
            self.row_advantages = validate.bounded(m, "shape", "`row_factor` times advantage", made, rows, "row")

    def _apply_to_tokens(
        self, m: Method, shaped: Shape, tokens: Tokens, keep_rows: Tensor | None, factor: Tensor | None
    ) -> None:
        n, keep = len(tokens), tokens.keep
        changes: dict[str, Tensor] = {}
        if shaped.advantages is not None:
            changes["advantages"] = validate.bounded(m, "shape", "`advantages`", shaped.advantages, n, "token")
            self.row_advantages = None
        if factor is not None:
            made = changes.get("advantages", tokens.advantages) * self.spread(factor)
            self.row_advantages = None if self.row_advantages is None else self.row_advantages * factor
            changes["advantages"] = validate.bounded(m, "shape", "`row_factor` times advantage", made, n, "token")
        if shaped.old_logprobs is not None:
            given = validate.bounded(m, "shape", "`old_logprobs`", shaped.old_logprobs, n, "token")
            changes["old_logprobs"] = given.float()
            self.new_old_logprobs = True
        if keep_rows is not None:
            keep = keep & self.spread(keep_rows)
        if shaped.keep_tokens is not None:
            keep = keep & validate.mask(m, "shape", "`keep_tokens`", shaped.keep_tokens, n, "token")
        old = changes.get("old_logprobs")
        if self.of_tokens and old is not None and bool((old[keep] > LARGEST_LOGPROB).any()):
            why = f"`old_logprobs` has {float(old[keep].max()):g}, and a log-prob is at most 0."
            raise validate.invalid_return(m, "shape", why)
        self._add(m, self.token_columns, shaped.token_columns, n, "token")
        self.tokens = tokens.replace(keep=keep, **changes)

    def _add(self, m: Method, columns: dict[str, Tensor], given: Any, n: int, kind: str) -> None:
        for name, value in validate.columns(m, "shape", f"`{kind}_columns`", given, n, kind).items():
            if name in self.row_columns or name in self.token_columns:
                raise validate.invalid_return(m, "shape", f"the column `{name}` exists already.")
            columns[name] = value

    @cached_property
    def of_row(self) -> Groups:
        """The tokens of each row."""
        assert self.tokens is not None
        return Groups(self.tokens.row, count=len(self.rollouts))

    def spread(self, values: Tensor) -> Tensor:
        """(rows,) -> (tokens,)"""
        return spread(values, self.of_row.size)

    @cached_property
    def left(self) -> Tensor:
        """(rows,) tokens of each row that stay, when all hooks have run."""
        if self.tokens is None:
            return self.rollouts.length
        return count_true(self.tokens.keep, self.of_row.size)

    @cached_property
    def stays(self) -> Tensor:
        """(rows,) bool, when all hooks have run. A row whose every token left is gone, too; one that never had a token
        stays."""
        return self.keep_rows if self.tokens is None else self.keep_rows & ((self.left > 0) | (self.of_row.size == 0))


def _check_rows(stays: Tensor, rollouts: Rollouts, budget: int) -> None:
    """Refuses more rows than the batch holds."""
    if int(stays.sum()) <= budget:
        return
    groups = Groups(rollouts.group[stays])
    sizes = list(zip(groups.ids.tolist(), groups.size.tolist(), strict=True))
    listed = ", ".join(f"group {g}: {n}" for g, n in sizes[:32])
    raise MethodError(
        f"{int(stays.sum())} rows would be trained, the batch takes {budget}. Rows that stayed: {listed}"
        f"{', ..' if len(sizes) > 32 else ''}. The method that asked for spare rollouts must make them leave "
        f"(`select` or `shape`)."
    )


def check_full(stack: MethodStack, decision: Decision, rows: int) -> None:
    """Holds methods to their word that the batch stays full.

    Args:
        rows: those the host trains.

    Raises:
        MethodError: fewer stay, and every method that could take some out has `keeps_batch_size`.
    """
    if bool(torch.isnan(decision.rollouts.reward).all()):
        return  # the batch is skipped
    missing = rows - int(decision.stays.sum())
    takers = dict.fromkeys(m for hook in _TAKERS for m in stack.claims[hook])
    if missing > 0 and takers and all(m.keeps_batch_size for m in takers):
        names = ", ".join(f"`{m.name}`" for m in takers)
        raise MethodError(
            f"{missing} of {rows} rows are missing in the batch, and {names} states `keeps_batch_size`: it trains as "
            f"many rows as the host planned. Let it ask for as many rollouts in addition (`spare`) as it takes out, or "
            f"remove `keeps_batch_size`."
        )


def _decision_by_rows(selection: Selection, shaping: _Shaping, source: str) -> Decision:
    """Back to the coordinates of all rows.

    Args:
        source: who made the advantages.
    """
    kept = selection.rollouts.kept
    trained = shaping.keep_rows & (shaping.left > 0)
    assert shaping.row_advantages is not None  # there are no others
    return Decision(
        rollouts=selection.rollouts,
        stays=_back(shaping.stays, kept),
        trained=_back(trained, kept),
        keep_tokens=None,
        advantages=None,
        row_advantages=_back(torch.where(trained, shaping.row_advantages, 0.0), kept),
        uniform=True,
        old_logprobs=None,
        row_columns={k: _back(v, kept) for k, v in shaping.row_columns.items()},
        token_columns={},
        rewarded_by=selection.rewarded_by,
        estimator=source,
    )


def _decision_by_tokens(
    selection: Selection, shaping: _Shaping, within: Tokens, places: _Places, source: str
) -> Decision:
    """Back to the coordinates of all rows and tokens.

    Args:
        within: the tokens of the rows that `select` left, as `shaping` left them.
        places: of those among all that were given.
        source: who made the advantages.
    """
    kept, tokens_back = selection.rollouts.kept, places.back
    live, row_advantages = within.keep, shaping.row_advantages
    whole = bool(live.all())
    uniform = row_advantages is not None
    if row_advantages is None:
        values, of_row = within.advantages, shaping.of_row  # of the tokens that stay
        if not whole:
            values, of_row = values[live], Groups(within.row[live], count=len(shaping.rollouts))
        lowest = of_row.min(values)
        uniform = not bool((of_row.max(values) > lowest).any())
        row_advantages = lowest if uniform else of_row.mean(values)
    old = within.old_logprobs if shaping.new_old_logprobs else None
    return Decision(
        rollouts=selection.rollouts,
        stays=_back(shaping.stays, kept),
        trained=_back(shaping.left > 0, kept),
        keep_tokens=tokens_back(live),
        advantages=tokens_back(within.advantages if whole else _zero_elsewhere(within.advantages, live)),
        row_advantages=_back(torch.where(shaping.left > 0, row_advantages, 0.0), kept),
        uniform=uniform,
        old_logprobs=None if old is None else tokens_back(old),
        row_columns={k: _back(v, kept) for k, v in shaping.row_columns.items()},
        token_columns={k: tokens_back(v) for k, v in shaping.token_columns.items()},
        rewarded_by=selection.rewarded_by,
        estimator=source,
    )


def _zero_elsewhere(values: Tensor, where: Tensor) -> Tensor:
    """As `torch.where(where, values, 0.0)`, without touching memory where whole rows are 0."""
    found = np.zeros(len(values))
    np.copyto(found, values.numpy(), where=where.numpy())
    return torch.from_numpy(found)


def _back(values: Tensor, stayed: Tensor) -> Tensor:
    """Values of those that stayed -> values of all, 0 for those that left."""
    full = torch.zeros(len(stayed), dtype=values.dtype)
    full[stayed] = values
    return full


def _renumbered(keep: Tensor) -> Tensor:
    """Old number -> new number of what stays."""
    return torch.cumsum(keep, 0) - 1
